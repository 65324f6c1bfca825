"""Tiny models of every family as GGUF files, in llama.cpp and here, in float32: logprobs and greedy tokens.

    make compare-llama-cpp                                       in an environment of its own
    python scripts/compare_llama_cpp.py PYTHON [NAME ...]        PYTHON has the package xllamacpp

After prompts of some lengths llama.cpp reports the logprob of every token that may come next, after the longest it goes
on greedily; the largest difference to ours is printed, and whether the same tokens come. The table is Markdown, the
last line JSON; a run of all models writes tests/fixtures/llama_cpp.json, which scripts/support_table.py reads. A
difference above BOUND (GELU_BOUND where there is a GELU), a token that differs, or a model that llama.cpp does not load
end the run with status 1.

Where llama.cpp is known to compute something else than a model's own code, the same is done here: AS_LLAMA_CPP names
what, and GELU comes from a table of float16, as llama.cpp's does on a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.models.family_files import FIXTURES, IN_GGUF, expected_of, rows_of, write_as_gguf
from unspool.config import ModelConfig
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.gemma3n import TINY_GEMMA3N, Gemma3nConfig
from unspool.models.random import END, byte_vocabulary, random_checkpoint
from unspool.models.registry import gguf_name
from unspool.ops import reference
from unspool.ops.reference import ReferenceOps
from unspool.weights.weight import Weight, encode_weight

VOCABULARY = 320
RESULTS = FIXTURES.parent / "llama_cpp.json"
LENGTHS, ANSWER = (1, 5, 40, 150), 8  # tokens of prompts, and of what follows each
# A row at the border between two float16 numbers takes either value from llama.cpp's table of GELU.
BOUND, GELU_BOUND = 1e-4, 1e-3
PADDED = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
SERVER = """
import sys, json, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 512, 1
params.hostnames, params.port, params.verbosity, params.warmup = ["127.0.0.1"], int(sys.argv[2]), -1, False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.n_gpu_layers, params.flash_attn_type = 0, xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(600)
"""


# What llama.cpp does differently --------------------------------------------------------------------------------------
def without_window(config: ModelConfig) -> ModelConfig:
    return replace(config, sliding_window=None, sliding_layers=None)


def with_whole_ramp(config: ModelConfig) -> ModelConfig:
    assert config.rope_scaling is not None
    return replace(config, rope_scaling=replace(config.rope_scaling, truncate=True))


def with_two_experts_a_group(config: ModelConfig) -> ModelConfig:
    return replace(config, group_top=2)  # type: ignore[call-arg]


def with_unbiased_deviation(config: ModelConfig) -> ModelConfig:
    assert isinstance(config, Gemma3nConfig)
    by = [np.sqrt(width / (width - 1)) for width in config.widths]
    cutoffs = [None if each is None else each * factor for each, factor in zip(config.cutoffs, by, strict=True)]
    return replace(config, cutoffs=tuple(cutoffs))


NO_WINDOW = (without_window, "llama.cpp has no window in this family")
AS_LLAMA_CPP: dict[str, tuple[Callable[[ModelConfig], ModelConfig], str]] = {
    "mistral": NO_WINDOW,
    "mixtral": NO_WINDOW,
    "phi3": NO_WINDOW,
    "starcoder2": NO_WINDOW,
    "gpt-oss": (with_whole_ramp, "llama.cpp's ramp of yarn begins and ends at whole pairs of channels"),
    "deepseek-v2": (with_two_experts_a_group, "llama.cpp ranks groups by two experts, DeepSeek V2 by one"),
    "gemma3n": (with_unbiased_deviation, "llama.cpp divides by n - 1 for the deviation of gates"),
}


def gelu_from_a_table(x: np.ndarray) -> np.ndarray:
    """What llama.cpp looks up in a table: of x in float16, in float16; without, where |x| is 10 or more."""
    found = reference.gelu_tanh(x.astype(np.float16).astype(np.float32)).astype(np.float16).astype(np.float32)
    return np.where(x <= -10, 0, np.where(x >= 10, x, found)).astype(np.float32)


# Models ---------------------------------------------------------------------------------------------------------------
# llama.cpp has these numbers of Gemma 3n in its code: layers with keys of their own, the first layers whose gates are
# cut off, and how far; widths of inputs and of the learned residual.
GEMMA3N = replace(
    TINY_GEMMA3N,
    num_layers=22,
    shared_layers=2,
    sliding_layers=tuple(layer % 5 != 4 for layer in range(22)),
    token_width=256,
    num_parts=4,
    laurel_rank=64,
    widths=(TINY_GEMMA3N.intermediate_size,) * 22,
    cutoffs=(1.6448533535003662,) * 10 + (None,) * 12,
    token_rows=None,
    vocab_size=VOCABULARY,
)
MADE = {"gemma3n": GEMMA3N}
DEEPENED = {"deepseek-v2-lite": 27}  # by which llama.cpp knows the model whose queries have no short row


def checkpoint_of(name: str) -> Checkpoint:
    """A model in float32 whose vocabulary has the bytes."""
    if name in MADE:
        return tempered(with_unused_keys(random_checkpoint(MADE[name])))
    checkpoint = open_checkpoint(FIXTURES / name)
    weights = {key: widened(key, weight) for key, weight in checkpoint.weights.items()}
    layers = DEEPENED.get(name, checkpoint.config.num_layers)
    config = replace(checkpoint.config, vocab_size=VOCABULARY, num_layers=layers)
    return replace(checkpoint, config=config, weights=deepened(weights, checkpoint.config.num_layers, layers))


def with_unused_keys(checkpoint: Checkpoint) -> Checkpoint:
    """Layers that read another layer's keys and values have tensors for some of their own, as published files do."""
    config, weights = checkpoint.config, dict(checkpoint.weights)
    assert isinstance(config, Gemma3nConfig)
    for layer in range(config.num_layers - config.shared_layers, config.num_layers):
        for part in ("attn_k", "attn_v", "attn_k_norm"):
            own = f"blk.{layer}.{part}.weight"
            weights[own] = replace(weights[f"blk.0.{part}.weight"], name=own)
    return replace(checkpoint, weights=weights)


def tempered(checkpoint: Checkpoint) -> Checkpoint:
    """So many layers of random weights amplify rounding, llama.cpp's of GELU above all. Layers that add little to the
    stream do so less, and gates beyond 10 are not looked up in llama.cpp's table; what comes of gates is normed."""
    factors = {"ffn_gate": 1000.0, "inp_gate": 1000.0} | dict.fromkeys(
        ("post_attention_norm", "post_ffw_norm", "post_norm", "laurel_post_norm"), 0.1
    )
    weights = {}
    for name, weight in checkpoint.weights.items():
        factor = factors.get(name.split(".")[-2])
        weights[name] = weight if factor is None else encode_weight(name, np.float32(factor) * weight.dequantize())
    return replace(checkpoint, weights=weights)


def widened(name: str, weight: Weight) -> Weight:
    """Tokens that are added are unlikely ones."""
    values = weight.dequantize()
    if name in PADDED:
        more = np.random.default_rng(0).standard_normal((VOCABULARY - len(values), values.shape[1]))
        values = np.concatenate([values, 0.01 * more.astype(np.float32)])
    return encode_weight(name, values, "f32")


def deepened(weights: dict[str, Weight], have: int, want: int) -> dict[str, Weight]:
    """The last layer again and again."""
    last, result = f"blk.{have - 1}.", dict(weights)
    for layer in range(have, want):
        for name, weight in weights.items():
            if name.startswith(last):
                again = f"blk.{layer}.{name.removeprefix(last)}"
                result[again] = replace(weight, name=again)
    return result


def vocabulary(size: int) -> dict[str, Any]:
    """Words, for llama.cpp reports nothing about tokens that end amid a character. It wants a merge."""
    usual = byte_vocabulary(size)
    words = [each if each == END else f"w{index}" for index, each in enumerate(usual["tokenizer.ggml.tokens"])]
    return usual | {"tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": ["a b"]}


# Comparing ------------------------------------------------------------------------------------------------------------
def answer_of(address: str, ids: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """llama.cpp's greedy tokens after a prompt, and the logprobs of every token at each."""
    body = {"prompt": ids, "n_predict": count, "n_probs": VOCABULARY, "temperature": 0, "top_k": 0,
            "cache_prompt": False, "post_sampling_probs": False}  # fmt: skip
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode(), kind)
    steps = json.load(urllib.request.urlopen(request)).get("completion_probabilities", [])
    logprobs = np.full((len(steps), VOCABULARY), np.nan)
    for row, step in zip(logprobs, steps, strict=True):
        for each in step["top_logprobs"]:
            row[each["id"]] = each["logprob"]
    if not steps or np.isnan(logprobs).any():
        raise RuntimeError("llama.cpp did not report the logprobs of all tokens")
    return [step["id"] for step in steps], logprobs


def differences(address: str, checkpoint: Checkpoint, ids: np.ndarray) -> tuple[float, bool]:
    """The largest difference of a logprob, and whether all greedy tokens are the same."""
    last = max(LENGTHS)
    found = {length: answer_of(address, ids[:length].tolist(), ANSWER if length == last else 1) for length in LENGTHS}
    read = np.concatenate([ids[:last], found[last][0][:-1]]).astype(np.int32)
    logits = rows_of(checkpoint, ReferenceOps(), read, [len(read)]).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    ours = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    worst, same = 0.0, True
    for length, (answer, theirs) in found.items():
        own = ours[length - 1 : length - 1 + len(answer)]
        worst = max(worst, float(np.abs(own - theirs).max()))
        same = same and own.argmax(axis=1).tolist() == answer
    return worst, same


def compare(python: str, name: str, port: int) -> tuple[float, bool]:
    checkpoint = checkpoint_of(name)
    ids = np.random.default_rng(1).integers(96, size=max(LENGTHS)) if name in MADE else expected_of(name)["ids"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        with mock.patch("tests.models.family_files.byte_vocabulary", vocabulary):
            write_as_gguf(path, checkpoint, vocabulary=True)
        read = open_checkpoint(path)
        if name in AS_LLAMA_CPP:
            read = replace(read, config=AS_LLAMA_CPP[name][0](read.config))
        server = subprocess.Popen(
            [python, "-c", SERVER, str(path), str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            if not address:
                raise RuntimeError(server.communicate()[1][-300:].strip().replace("\n", " "))
            with mock.patch.dict(reference.ACTIVATIONS, gelu_tanh=gelu_from_a_table):
                return differences(address, read, ids)
        finally:
            server.kill()
            server.communicate()


def main(python: str, names: list[str]) -> int:
    found: dict[str, dict[str, object]] = {}
    failed = False
    print("| family | GGUF | model | largest difference | greedy | |\n|---|---|---|---|---|---|", flush=True)
    for index, name in enumerate(names or IN_GGUF):
        config = checkpoint_of(name).config
        family, bound = config.architecture, GELU_BOUND if "gelu" in config.activation else BOUND
        row = f"| `{family}` | `{gguf_name(family)}` | {name}"
        note = AS_LLAMA_CPP[name][1] if name in AS_LLAMA_CPP else ""
        try:
            worst, same = compare(python, name, 18431 + index)
        except RuntimeError as error:  # a model that llama.cpp does not load
            failed = True
            print(f"{row} | {error} | | {note} |", flush=True)
            continue
        failed = failed or not same or worst > bound
        found[name] = {"difference": float(f"{worst:.1e}"), "greedy": same, "note": note}
        print(f"{row} | {worst:.1e} | {'same' if same else 'differ'} | {note} |", flush=True)
    if not names:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(json.dumps(found))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

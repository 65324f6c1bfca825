"""Tiny models of tests/fixtures/families as GGUF files: logprobs beside llama.cpp's own, in float32.

    python scripts/compare_llama_cpp.py PYTHON [NAME ...]     PYTHON has the package xllamacpp

For some lengths of a prompt, llama.cpp tells the logprob of every token that may come next; the largest difference to
ours is printed. The last line is JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.models.family_files import FIXTURES, IN_GGUF, expected_of, rows_of, write_as_gguf
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.random import byte_vocabulary
from unspool.ops.reference import ReferenceOps
from unspool.weights.weight import encode_weight

VOCABULARY = 320
DEEPENED = {"deepseek-v2-lite": 27}  # by which llama.cpp knows the model whose queries have no short row
LENGTHS = (1, 5, 40, 150)
SERVER = """
import sys, json, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 640, 1
params.hostnames, params.port, params.verbosity, params.warmup = ["127.0.0.1"], int(sys.argv[2]), -1, False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.n_gpu_layers, params.flash_attn_type = 0, xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(600)
"""


def vocabulary(size: int) -> dict[str, Any]:
    """Bytes; llama.cpp wants a merge."""
    return byte_vocabulary(size) | {"tokenizer.ggml.merges": ["a b"]}


def deepen(checkpoint: Checkpoint, num_layers: int) -> None:
    """The last layer again and again."""
    last = f"blk.{checkpoint.config.num_layers - 1}."
    for key, weight in list(checkpoint.weights.items()):
        for layer in range(checkpoint.config.num_layers, num_layers) if key.startswith(last) else ():
            again = f"blk.{layer}.{key.removeprefix(last)}"
            checkpoint.weights[again] = replace(weight, name=again)


def next_logprobs(address: str, ids: list[int], size: int) -> np.ndarray:
    body = {"prompt": ids, "n_predict": 1, "n_probs": size, "temperature": 0, "top_k": 0, "cache_prompt": False,
            "post_sampling_probs": False}  # fmt: skip
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode(), kind)
    found = json.load(urllib.request.urlopen(request))["completion_probabilities"][0]["top_logprobs"]
    logprobs = np.full(size, np.nan)
    for each in found:
        logprobs[each["id"]] = each["logprob"]
    return logprobs


def compare(python: str, name: str, port: int) -> float:
    """The largest difference of a logprob."""
    checkpoint = open_checkpoint(FIXTURES / name)
    for key, weight in checkpoint.weights.items():
        values = weight.dequantize()
        if key in ("token_embd.weight", "output.weight"):  # a vocabulary of bytes has more tokens
            values = np.pad(values, ((0, VOCABULARY - len(values)), (0, 0)))
        checkpoint.weights[key] = encode_weight(key, values, "f32")
    layers = DEEPENED.get(name, checkpoint.config.num_layers)
    deepen(checkpoint, layers)
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, vocab_size=VOCABULARY, num_layers=layers))
    ids, worst = expected_of(name)["ids"], 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        with mock.patch("tests.models.family_files.byte_vocabulary", vocabulary):
            write_as_gguf(path, checkpoint, vocabulary=True)
        ours = rows_of(open_checkpoint(path), ReferenceOps(), ids[: max(LENGTHS)], [max(LENGTHS)])
        server = subprocess.Popen(
            [python, "-c", SERVER, str(path), str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            if not address:
                raise RuntimeError(server.communicate()[1][-2000:])
            for length in LENGTHS:
                theirs = next_logprobs(address, ids[:length].tolist(), checkpoint.config.vocab_size)
                row = ours[length - 1].astype(np.float64)
                own = row - row.max() - np.log(np.exp(row - row.max()).sum())
                worst = max(worst, float(np.nanmax(np.abs(own - theirs))))
        finally:
            server.kill()
            server.communicate()
    return worst


def main(python: str, names: list[str]) -> None:
    found = {}
    for index, name in enumerate(names or IN_GGUF):
        try:
            found[name] = compare(python, name, 18431 + index)
            print(f"{name}: {found[name]:.1e}", flush=True)
        except Exception as error:  # a model that llama.cpp does not load
            print(f"{name}: {type(error).__name__}: {str(error)[-600:]}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

"""Tiny models of every family through llama.cpp's own converter, and the Hugging Face files that they were made from.

    python scripts/compare_converter.py CHECKOUT PYTHON [NAME ...]

CHECKOUT is a checkout of llama.cpp (its convert_hf_to_gguf.py is run, nothing is built), PYTHON an interpreter with
torch, transformers and sentencepiece. Each model of tests/fixtures/families is converted to a GGUF file of float32,
which unspool reads. Three things are compared: logprobs of 600 tokens with those of transformers, logits with those of
the Hugging Face files, and the file's keys and tensors with those that unspool writes for the same model.

transformers 5 writes some fields of config.json by other names than published models have, or leaves them out; the
converter is given the published ones (AS_PUBLISHED). Where the converter leaves something of the model out, the Hugging
Face model is run without it, too (LEFT_OUT). The table is Markdown, the last line JSON; a run of all models writes
tests/fixtures/converter.json. A difference above BOUND, or a model that cannot be read, ends the run with status 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.models.family_files import (
    FIXTURES,
    NAMES,
    NOT_IN_GGUF,
    expected_of,
    logprobs_of,
    rows_of,
    stacked,
    write_as_gguf,
)
from tests.models.head_directory import with_glm_head, with_qwen_head
from tests.models.mxfp4_directory import write_directories
from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.limits import every_nth_is_global
from unspool.ops.cpu import CpuOps
from unspool.weights.gguf import GGUFFile, open_gguf
from unspool.weights.safetensors import open_safetensors_directory, write_safetensors
from unspool.weights.weight import Weight, encode_weight

RESULTS = FIXTURES.parent / "converter.json"
PIECES = [250, 1, 93, 256]
BOUND, LONGROPE_BOUND = 1e-4, 3e-4  # as tests/models/test_matrix.py has them
# Runs in PYTHON. Models here have no tokenizer, so that the vocabulary is words w0, w1, …; all else is the converter's.
CONVERT = """
import sys
checkout, folder, *jobs = sys.argv[1:]
sys.path[:0] = [checkout, checkout + "/gguf-py"]
import convert_hf_to_gguf, conversion
from conversion.base import TextModel
conversion.load_all_models()

def set_vocab(self):
    size = self.hparams["vocab_size"]
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("default")
    self.gguf_writer.add_token_list([f"w{index}" for index in range(size)])
    self.gguf_writer.add_token_types([1] * size)

def derived(kind):
    return [kind, *(each for child in kind.__subclasses__() for each in derived(child))]

for kind in derived(TextModel):
    if "set_vocab" in vars(kind):
        kind.set_vocab = set_vocab
for job in jobs:
    name, *options = job.split()
    for kind in derived(TextModel):  # the last job's options stay in classes
        if "no_mtp" in vars(kind):
            del kind.no_mtp
    sys.argv = ["", f"{folder}/{name}", "--outfile", f"{folder}/{name}.gguf", "--outtype", "f32", *options]
    try:
        convert_hf_to_gguf.main()
    except (Exception, SystemExit) as error:
        reason = "the converter does not know this class" if isinstance(error, SystemExit) else str(error)
        print(f"{name}\\t{reason.splitlines()[0] if reason else type(error).__name__}", flush=True)
"""

Fields = dict[str, Any]


# What published models have ---------------------------------------------------------------------------------------
def named(names: Mapping[str, str], key: str = "layer_types") -> Callable[[Fields], Fields]:
    """Kinds of layers by other names."""
    return lambda config: config | {key: [names.get(each, each) for each in config[key]]}


def with_fields(**values: Any) -> Callable[[Fields], Fields]:
    return lambda config: config | values


def granite_hybrid(config: Fields) -> Fields:
    config = named({"linear_attention": "mamba", "full_attention": "attention"})(config)
    if config["num_local_experts"]:
        return config
    return config | {"num_experts_per_tok": 0, "intermediate_size": config["shared_intermediate_size"]}


def nemotron_h(config: Fields) -> Fields:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    config = named(names, "layers_block_type")(config) | {"norm_eps": config["layer_norm_epsilon"]}
    if "moe" in config["layers_block_type"]:
        return config
    letters = {"mamba": "M", "attention": "*", "mlp": "-"}
    pattern = "".join(letters[each] for each in config["layers_block_type"])
    experts = ("num_experts_per_tok", "n_routed_experts", "layers_block_type")
    return {key: value for key, value in config.items() if key not in experts} | {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
    }


def mistral4(config: Fields) -> Fields:
    text = {key: value for key, value in config.items() if key != "architectures"}
    return {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}


def every_nth_attends(config: Fields) -> Fields:
    """Published models say which layers attend by a number, which the converter reads."""
    text = config.get("text_config", config)
    return config | {"full_attention_interval": text["layer_types"].index("full_attention") + 1}


DELTA = (every_nth_attends, "--no-mtp")
HYBRID = (granite_hybrid, "")
AS_PUBLISHED: dict[str, tuple[Callable[[Fields], Fields], str]] = {
    "deepseek-v2": (with_fields(scoring_func="softmax"), ""),
    "deepseek-v2-lite": (with_fields(scoring_func="softmax"), ""),
    "deepseek-v3": (with_fields(scoring_func="sigmoid"), ""),
    "glm4-moe-lite": (with_fields(scoring_func="sigmoid", first_k_dense_replace=1), ""),
    "gpt2": (lambda config: config | {"n_ctx": config["n_positions"]}, ""),
    "granite-4-dense": HYBRID,
    "granite-hybrid": HYBRID,
    "granite-hybrid-dense": HYBRID,
    "mistral4": (mistral4, ""),
    "nemotron-h": (nemotron_h, ""),
    "nemotron-h-latents": (nemotron_h, ""),
    "nemotron-h-moe": (nemotron_h, ""),
    "qwen3-next": DELTA,
    "qwen3.5": DELTA,
    "qwen3.5-images": DELTA,
    "qwen3.5-moe": DELTA,
}
# Models that are made of others: with experts in MXFP4, and with a head that predicts a token further ahead.
MXFP4 = {"gpt-oss-mxfp4": "gpt-oss"}
GLM_HEAD, QWEN35_HEAD = (with_glm_head, "num_nextn_predict_layers"), (with_qwen_head, "mtp_num_hidden_layers")
HEADS: dict[str, tuple[str, Callable[[Path, str], Path], str]] = {
    "glm4-moe-head": ("glm4-moe", *GLM_HEAD),
    "glm4-moe-lite-head": ("glm4-moe-lite", *GLM_HEAD),
    "qwen3-next-head": ("qwen3-next", *QWEN35_HEAD),
    "qwen3.5-head": ("qwen3.5", *QWEN35_HEAD),
    "qwen3.5-moe-head": ("qwen3.5-moe", *QWEN35_HEAD),
}
SOURCES = MXFP4 | {name: source for name, (source, _, _) in HEADS.items()}
TRANSPOSED = ("qwen3-vl-moe",)  # published files have experts as [expert, in, out]


# What the converter leaves out --------------------------------------------------------------------------------------
def without_window(config: ModelConfig) -> ModelConfig:
    return replace(config, sliding_window=None, sliding_layers=None)


def with_every_sixth_whole(config: ModelConfig) -> ModelConfig:
    return replace(config, sliding_layers=every_nth_is_global(6, config.num_layers))


def with_silu(config: ModelConfig) -> ModelConfig:
    return replace(config, activation="silu")


def without_growth(config: ModelConfig) -> ModelConfig:
    return replace(config, growth=0.0)  # type: ignore[call-arg]


NO_WINDOW = (without_window, "llama.cpp's converter leaves the window out")
SIXTH = (with_every_sixth_whole, "llama.cpp's converter leaves the pattern of windows out: every sixth layer has none")
NO_GELU = (with_silu, "llama.cpp's converter leaves the activation out")
LEFT_OUT: dict[str, tuple[Callable[[ModelConfig], ModelConfig], str]] = {
    "gemma3": SIXTH,
    "gemma3-images": SIXTH,
    "llama-gelu": NO_GELU,
    "llama-gelu-tanh": NO_GELU,
    "mistral": NO_WINDOW,
    "mistral4": (without_growth, "llama.cpp's converter leaves the growth of queries with their position out"),
    "mixtral": NO_WINDOW,
    "qwen2-moe-sliding": NO_WINDOW,
    "qwen2-sliding": NO_WINDOW,
    "qwen3-sliding": NO_WINDOW,
    "starcoder2": NO_WINDOW,
}


# Converting -----------------------------------------------------------------------------------------------------------
def write_published(folder: Path, name: str) -> str:
    """The model as published ones are, in a folder of its own; the converter's options for it."""
    inner, source = folder / name, SOURCES.get(name, name)
    change, options = AS_PUBLISHED.get(source, (lambda config: config, ""))
    if name in MXFP4:
        write_directories(FIXTURES / source, folder / f"{name}-floats", inner)
        options = ""
    elif name in HEADS:
        HEADS[name][1](inner, source)
        options = ""
    else:
        shutil.copytree(FIXTURES / source, inner)
    config = change(json.loads((inner / "config.json").read_text("utf-8")))
    if name in HEADS:
        config[HEADS[name][2]] = 1
    (inner / "config.json").write_text(json.dumps(config), "utf-8")
    # Gemma's embedding is cut to the tokens of this file.
    vocab = {f"w{index}": index for index in range(config.get("text_config", config)["vocab_size"])}
    (inner / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}), "utf-8")
    if name in TRANSPOSED:
        tensors = open_safetensors_directory(FIXTURES / source)
        turned_ones = {key: turned(each) if ".experts." in key else each for key, each in tensors.items()}
        write_safetensors(inner / "model.safetensors", turned_ones)
    return f"{name} {options}"


def turned(weight: Weight) -> Weight:
    return encode_weight(weight.name, np.ascontiguousarray(weight.dequantize().swapaxes(1, 2)), weight.format)


def convert(checkout: str, python: str, folder: Path, names: list[str]) -> dict[str, str]:
    """Writes NAME.gguf of each; the reason for each that the converter does not convert."""
    jobs = [write_published(folder, name) for name in names]
    done = subprocess.run([python, "-c", CONVERT, checkout, str(folder), *jobs], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)


# Comparing ------------------------------------------------------------------------------------------------------------
def differences(name: str, folder: Path) -> dict[str, Any]:
    """Of the converted file NAME.gguf and the directory NAME."""
    source = SOURCES.get(name, name)
    plain, read = open_checkpoint(folder / name), open_checkpoint(folder / f"{name}.gguf")
    ids, note = expected_of(source)["ids"], ""
    if name in LEFT_OUT:
        change, note = LEFT_OUT[name]
        plain = replace(plain, config=change(plain.config))
    found, ours = (rows_of(each, CpuOps(threads=1), ids, PIECES) for each in (read, plain))
    same_values = not note and name not in MXFP4
    wanted = expected_of(source)["logprobs"] if same_values else logprobs_of(ours, ids)
    result = {
        "difference": float(f"{np.abs(logprobs_of(found, ids) - wanted).max():.1e}"),
        "to_directory": float(f"{np.abs(found - ours).max():.1e}"),
        "note": note,
    }
    if name in HEADS:
        return result | {"tensors": tensor_differences(read.draft_weights(), stacked(plain.draft_weights()))}
    return result if name in NOT_IN_GGUF else result | file_differences(plain, open_gguf(folder / f"{name}.gguf"))


def file_differences(checkpoint: Checkpoint, file: GGUFFile) -> dict[str, Any]:
    """Keys and tensors in which the converter's file differs from the one that unspool writes: the keys that it does
    not have, those that it has in addition or with another value, and what is different about tensors."""
    with tempfile.TemporaryDirectory() as folder:
        write_as_gguf(Path(folder) / "model.gguf", checkpoint)
        own = open_gguf(Path(folder) / "model.gguf")
        theirs, ours = keys_of(file), keys_of(own)
        return {
            "absent": sorted(ours.keys() - theirs.keys()),
            "other": {key: value for key, value in theirs.items() if key not in ours or differ(value, ours[key])},
            "tensors": tensor_differences(file.tensors, own.tensors),
        }


def keys_of(file: GGUFFile) -> dict[str, Any]:
    """The architecture, and what the keys that begin with its name say."""
    name = str(file.metadata["general.architecture"])
    found = {key: file.metadata[key] for key in file.metadata if key.startswith(f"{name}.")}
    return {"architecture": name} | {key.removeprefix(f"{name}."): value for key, value in found.items()}


def differ(one: Any, other: Any) -> bool:
    numbers = all(isinstance(each, int | float) for value in (one, other) for each in np.atleast_1d(value).tolist())
    return not (np.shape(one) == np.shape(other) and np.allclose(one, other)) if numbers else one != other


def tensor_differences(theirs: Mapping[str, Weight], ours: Mapping[str, Weight]) -> list[str]:
    found = [f"{name} only in {'ours' if name in ours else 'theirs'}" for name in sorted(theirs.keys() ^ ours.keys())]
    for name in sorted(theirs.keys() & ours.keys()):
        one, other = theirs[name], ours[name]
        if [size for size in one.shape if size > 1] != [size for size in other.shape if size > 1]:
            found.append(f"{name} has shape {list(one.shape)}, ours {list(other.shape)}")
        elif not np.allclose(one.dequantize().reshape(-1), other.dequantize().reshape(-1), 1e-6, 1e-7):
            found.append(f"{name} has other values")
    return found


def row_of(name: str, folder: Path) -> tuple[dict[str, Any], bool]:
    """A model's result, and whether it is as it must be."""
    try:
        found = differences(name, folder)
    except ModelError as error:
        return {"refused_here": str(error)}, False
    bound = LONGROPE_BOUND if name == "phi3-long" else BOUND
    return found, found["difference"] <= bound and not (name in HEADS and found["tensors"])


def main(checkout: str, python: str, names: list[str]) -> int:
    found: dict[str, dict[str, Any]] = {}
    failed = False
    names, is_whole = names or [*NAMES, *SOURCES], not names
    print("| model | to transformers | to the directory | |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        refused = convert(checkout, python, Path(folder), names)
        for name in names:
            if name in refused:
                found[name] = {"refused": refused[name]}
                print(f"| {name} | | | not converted: {refused[name]} |", flush=True)
                continue
            row, is_right = row_of(name, Path(folder))
            failed, found[name] = failed or not is_right, row
            values = f"{row['difference']:.1e} | {row['to_directory']:.1e} | {row['note']}" if "note" in row else row
            print(f"| {name} | {values} |", flush=True)
    if is_whole:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(json.dumps(found))
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="a checkout of llama.cpp")
    parser.add_argument("python", help="an interpreter with torch, transformers and sentencepiece")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models (all)")
    options = parser.parse_args()
    if not (Path(options.checkout) / "convert_hf_to_gguf.py").is_file():
        parser.error(f"{options.checkout} is no checkout of llama.cpp: it has no convert_hf_to_gguf.py")
    unknown = sorted({*options.names} - {*NAMES, *SOURCES})
    if unknown:
        parser.error(f"there is no model {unknown[0]!r}; there are {', '.join([*NAMES, *SOURCES])}")
    sys.exit(main(options.checkout, options.python, options.names))

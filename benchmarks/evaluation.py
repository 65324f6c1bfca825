"""lm-eval's scores of one model in three ways: through our adapter, through our server, and through transformers.

    make eval-env                                    once: an environment with lm-eval, transformers and torch
    python -m benchmarks evaluation --python .venv-eval/bin/python --limit 300

All three are given the same token ids: a tokenizer.json is written from the GGUF file's vocabulary and merges, because
transformers' own conversion of the file cuts some texts differently. Transformers dequantizes the file's weights to
float32; ours computes with them as they are, with inputs rounded to 8 bits. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from unspool.errors import BackendError
from unspool.machine import num_cores
from unspool.reporting import print_table
from unspool.weights.store import resolve

TASKS = ("hellaswag", "arc_easy", "lambada")
SIDES = ("adapter", "server", "transformers")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
START_SECONDS = 120


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks evaluation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", required=True, help="of an environment made by `make eval-env`")
    parser.add_argument("-m", "--model", default="smollm2", help="a GGUF file of the llama family (smollm2)")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--limit", type=int, default=300, help="items of each task (300)")
    parser.add_argument("--only", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--port", type=int, default=8471)
    options = parser.parse_args(argv)
    model = resolve(options.model)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_tokenizer(model, folder / "tokenizer")
        run([options.python, "-m", "unspool", "eval", *options.tasks, "--write", str(folder / "tasks")])
        sides = {side: measure(side, model, folder, options) for side in options.only}
    report(sides, options)
    print(json.dumps({"benchmark": "evaluation", "model": model.name, "limit": options.limit, "sides": sides}))
    return 0


def measure(side: str, model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    if side == "adapter":
        results = harness("unspool", {"model": model, "tokenizer": folder / "tokenizer"}, folder, options, threads=True)
    elif side == "server":
        with server(model, options) as url:
            arguments = {
                "model": model.stem, "base_url": f"{url}/v1/completions", "tokenizer": folder / "tokenizer",
                "tokenizer_backend": "huggingface", "tokenized_requests": True, "num_concurrent": 4, "max_length": 2048,
            }  # fmt: skip
            results = harness("local-completions", arguments, folder, options)
    else:
        arguments = {"pretrained": model.parent, "gguf_file": model.name, "tokenizer": folder / "tokenizer",
                     "dtype": "float32"}  # fmt: skip
        results = harness("hf", arguments, folder, options)
    return {"seconds": time.perf_counter() - start, "tasks": results}


# Running lm-eval ----------------------------------------------------------------------------------------------------
def harness(
    model: str, arguments: Mapping[str, Any], folder: Path, options: argparse.Namespace, *, threads: bool = False
) -> dict[str, Any]:
    """lm-eval's own command line; the metrics of each task."""
    given = {**arguments, **({"threads": options.threads} if threads else {})}
    out = folder / model
    run([
        options.python, "-m", "unspool.evaluation.lm_eval_cli", "run", "--model", model,
        "--model_args", ",".join(f"{name}={value}" for name, value in given.items()),
        "--tasks", ",".join(options.tasks), "--include_path", str(folder / "tasks"), "--limit", str(options.limit),
        "--batch_size", "8" if model == "hf" else "1", "--output_path", str(out),
        *(["--device", "cpu"] if model == "hf" else []),
    ], {"OMP_NUM_THREADS": str(options.threads)})  # fmt: skip
    [found] = out.rglob("results_*.json")
    results = json.loads(found.read_text("utf-8"))["results"]
    return {task: {name.removesuffix(",none"): value for name, value in each.items() if isinstance(value, int | float)}
            for task, each in results.items()}  # fmt: skip


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, env={**os.environ, **OFFLINE, **(environment or {})}, capture_output=True, text=True)
    if done.returncode:
        raise BackendError(f"{' '.join(command[:6])} … ended with status {done.returncode}\n{done.stderr[-3000:]}")


@contextmanager
def server(model: Path, options: argparse.Namespace) -> Iterator[str]:
    url = f"http://127.0.0.1:{options.port}"
    command = [options.python, "-m", "unspool", "serve", "-m", str(model), "--port", str(options.port),
               "--threads", str(options.threads)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_SECONDS
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > end:
                raise BackendError("the server did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


# One tokenizer for all ----------------------------------------------------------------------------------------------
def write_tokenizer(model: Path, folder: Path) -> None:
    """A Hugging Face tokenizer of a byte-level vocabulary with digits one by one, as SmolLM's is."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from unspool.weights.gguf import open_gguf

    metadata = open_gguf(model).metadata
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    if metadata.get("tokenizer.ggml.pre") != "smollm":
        raise BackendError(f"{model.name}: tokenizers other than SmolLM's are not converted here")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    ])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True)
                             if kind == 3])  # fmt: skip
    folder.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


# Reporting ----------------------------------------------------------------------------------------------------------
def report(sides: Mapping[str, Mapping[str, Any]], options: argparse.Namespace) -> None:
    rows = []
    first = next(iter(sides.values()))
    for task in options.tasks:
        for metric in first["tasks"][task]:
            if not metric.endswith("_stderr") and metric != "sample_len":
                error = first["tasks"][task].get(f"{metric}_stderr")
                rows.append([task, metric, *(f"{each['tasks'][task][metric]:.4f}" for each in sides.values()),
                             "" if error is None else f"± {error:.4f}"])  # fmt: skip
    print(f"{options.limit} items of each task")
    print_table(["task", "", *sides, "standard error"], rows)
    print("seconds: " + ", ".join(f"{side} {each['seconds']:.0f}" for side, each in sides.items()))

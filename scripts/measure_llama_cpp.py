"""How close llama.cpp comes to the float32 reference on the SmolLM2 fixtures: the bar for a quantized body.

    python scripts/measure_llama_cpp.py --model SmolLM2-135M-Instruct.Q4_1.gguf --fixtures tests/fixtures/smollm2

needs `llama-cpp-python` and numpy, and nothing else. The last line is JSON; `tests/fixtures/smollm2/README.md` has the
numbers it printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


def load(path: Path, chunk: int, cache: str, threads: int) -> Any:
    kind = {"f16": llama_cpp.GGML_TYPE_F16, "f32": llama_cpp.GGML_TYPE_F32}[cache]
    passes = {"n_batch": chunk, "n_ubatch": chunk, "n_threads": threads, "n_threads_batch": threads}
    return llama_cpp.Llama(str(path), n_ctx=1024, logits_all=True, type_k=kind, type_v=kind, verbose=False, **passes)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def compare(logprobs: np.ndarray, text: dict[str, np.ndarray]) -> dict[str, float]:
    """Perplexity, top-1 agreement and KL(reference || ours) over the reference's top 64 and one bucket for the rest."""
    ids = text["ids"]
    nll = -logprobs[np.arange(len(ids) - 1), ids[1:]]
    ours = np.take_along_axis(logprobs, text["top_ids"], axis=-1)
    theirs = text["top_logprobs"].astype(np.float64)
    rest = np.log1p(-np.exp(ours).sum(axis=-1).clip(max=1 - 1e-12))
    their_rest = text["rest_logprob"].astype(np.float64)
    kl = (np.exp(theirs) * (theirs - ours)).sum(axis=-1) + np.exp(their_rest) * (their_rest - rest)
    perplexity, reference = float(np.exp(nll.mean())), float(np.exp(text["nll"].astype(np.float64).mean()))
    return {
        "perplexity": perplexity,
        "perplexity_change": perplexity / reference - 1,
        "mean_kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "top1_agreement": float((logprobs.argmax(axis=-1) == text["top_ids"][:, 0]).mean()),
    }


def teacher_forced(model: Any, ids: list[int]) -> np.ndarray:
    """Logits for every position; llama-cpp-python itself cuts the ids into passes of `n_batch`."""
    model.reset()
    model.eval(ids)
    return np.array(model.scores[: len(ids)])


def greedy(model: Any, prompt: list[int], steps: int) -> list[int]:
    model.reset()
    model.eval(prompt)
    chosen: list[int] = []
    for _ in range(steps):
        chosen.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(chosen[-1:])
    return chosen


def agreement(model: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each prompt, how many greedy ids are the reference's, and the reference's margin where they part."""
    rows = []
    for case in cases:
        ids = greedy(model, case["prompt_ids"], len(case["ids"]))
        pairs = zip(ids, case["ids"], strict=True)
        same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(ids))
        margin = case["margins"][same] if same < len(ids) else None
        rows.append({"name": case["name"], "same": same, "margin_there": margin, "min_margin": case["min_margin"]})
        print(f"{case['name']}: {same} of {len(ids)} ids equal" + (f", margin there {margin}" if margin else ""))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--fixtures", type=Path, required=True, help="the folder with greedy.json and the texts")
    parser.add_argument("--chunk", type=int, default=512, help="tokens a pass; 1 takes the decode kernels")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", choices=("f16", "f32"), default="f16", help="llama.cpp's key and value type")
    options = parser.parse_args()
    model = load(options.model, options.chunk, options.cache, options.threads)
    result: dict[str, Any] = {"llama_cpp_python": llama_cpp.__version__, "chunk": options.chunk, "cache": options.cache}
    for name in ("text512", "chat512"):
        with np.load(options.fixtures / f"{name}.npz") as file:
            text = {key: file[key] for key in file.files}
        result[name] = compare(log_softmax(teacher_forced(model, text["ids"].tolist())), text)
        print(name, result[name])
    result["greedy"] = agreement(model, json.loads((options.fixtures / "greedy.json").read_text())["cases"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Real GGUF files in llama.cpp and here: perplexity of a text, and greedy tokens after a part of it.

    python scripts/compare_real_models.py PYTHON FILE ...        PYTHON has the package xllamacpp

Each file's own tokenizer reads the first paragraphs of docs/why.md. From token 32 on llama.cpp tells the logprobs of
all next tokens, prefix by prefix; ours come from one pass over the same tokens. Keys and values are float16 in both.
Both round activations to 8 bits, each in its own way, so that greedy tokens may part where two are nearly equally
likely: the lead of our first token over the second is printed for the place where they do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.models.family_files import rows_of
from unspool.models.checkpoint import open_checkpoint
from unspool.ops.cpu import CpuOps

ROOT = Path(__file__).parent.parent
FIRST, COUNT, GREEDY = 32, 16, 48
SERVER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 1024, 1
params.hostnames, params.port, params.verbosity, params.warmup = ["127.0.0.1"], int(sys.argv[2]), -1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
params.n_gpu_layers = 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(3600)
"""


def complete(address: str, ids: list[int], **body: Any) -> dict[str, Any]:
    body = {"prompt": ids, "temperature": 0, "top_k": 0, "cache_prompt": True, "return_tokens": True} | body
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode(), kind)
    found: dict[str, Any] = json.load(urllib.request.urlopen(request))
    return found


def their_cost(address: str, ids: list[int], size: int) -> float | None:
    """Of the last token after the others; None: llama.cpp tells none where its own choice ends amid a character."""
    found = complete(address, ids[:-1], n_predict=1, n_probs=size).get("completion_probabilities")
    if not found:
        return None
    return next((-each["logprob"] for each in found[0]["top_logprobs"] if each["id"] == ids[-1]), None)


def compare(address: str, path: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(path)
    size = checkpoint.config.vocab_size
    text = (ROOT / "docs" / "why.md").read_text("utf-8")[:2000]
    ids = checkpoint.tokenizer().encode(text)[: FIRST + COUNT]
    answer = complete(address, ids[:FIRST], n_predict=GREEDY, ignore_eos=True)["tokens"]
    theirs = [their_cost(address, ids[: place + 1], size) for place in range(FIRST, FIRST + COUNT)]
    told = [place for place, cost in enumerate(theirs) if cost is not None]
    ops = CpuOps(threads=2)
    logits = rows_of(checkpoint, ops, np.array(ids, np.int32), [len(ids)], "f16").astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ours = [-logprobs[FIRST + place - 1, ids[FIRST + place]] for place in told]
    known = [cost for cost in theirs if cost is not None]
    read = np.array([*ids[:FIRST], *answer[:-1]], np.int32)
    greedy = rows_of(checkpoint, ops, read, [len(read)], "f16")[FIRST - 1 :]
    own = greedy.argmax(axis=1).tolist()
    same = next((place for place, pair in enumerate(zip(own, answer, strict=True)) if pair[0] != pair[1]), len(answer))
    second, first = np.sort(greedy[same])[-2:] if same < len(answer) else (0.0, 0.0)
    return {
        "model": path.name,
        "tokens": len(told),
        "perplexity": float(np.exp(np.mean(ours))),
        "llama_cpp": float(np.exp(np.mean(known))),
        "largest_difference": float(np.abs(np.array(ours) - known).max()),
        "greedy_same": same,
        "greedy_of": len(answer),
        "lead_there": None if same == len(answer) else float(first - second),
    }


def main(python: str, paths: list[str]) -> None:
    results = []
    for index, path in enumerate(paths):
        server = subprocess.Popen([python, "-c", SERVER, path, str(18331 + index)], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            results.append(compare(server.stdout.readline().strip(), Path(path)))
        finally:
            server.kill()
            server.communicate()
        print(results[-1], flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

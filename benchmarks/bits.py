"""Token ids and logprob bits of two checkouts: whether a change left every answer as it was.

    python -m benchmarks bits --python before/.venv/bin/python --python after/.venv/bin/python -m smollm2

Each checkout answers the same requests in a process of its own, through the public API: greedy and sampled, with
penalties and filters, alone and as a batch, several choices, scores of a prompt, on each kernel set of this processor.
Requests that only one of them accepts are reported as differences. Exit status 1: something differs. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LENGTHS = (1, 3, 40, 300)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 11},
    "penalised": {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.5, "seed": 12},
    "plain draw": {"seed": 13},
}


def answers(model: str, isa: Any) -> dict[str, Any]:
    """Every request's ids and logprob bits, by name; run in the checkout's own process."""
    import random

    from unspool import LLM, SamplingParams

    llm = LLM(model, device="cpu", isa=isa, kv_tokens=4096)
    rng = random.Random(5)
    prompts = [[rng.randrange(300, 20_000) for _ in range(length)] for length in LENGTHS]
    text = "The river runs past the old stone house where the light of the morning falls on the garden wall."

    def bits(values: Sequence[float] | None) -> list[str]:
        return [value.hex() for value in values or ()]

    found: dict[str, Any] = {}
    for name, fields in PARAMS.items():
        params = SamplingParams(max_tokens=24, logprobs=2, ignore_eos=True, **fields)
        for length, prompt in zip(LENGTHS, prompts, strict=True):
            result = llm.generate(prompt, params)
            found[f"{name}, {length} tokens"] = [result.token_ids, bits(result.logprobs)]
        for place, result in enumerate(llm.generate(prompts, params)):
            found[f"{name}, batch {place}"] = [result.token_ids, bits(result.logprobs)]
    scored = llm.score(llm.encode(text))
    found["score"] = [[token.id, *bits([token.logprob or 0.0])] for token in scored if token is not None]
    first = llm.generate(text, SamplingParams(max_tokens=24, seed=14, n=3)).choices[0]
    found["first of three"] = [first.token_ids, first.text]
    return found


def answers_of(python: str, model: str, isa: str) -> dict[str, Any]:
    command = [python, str(Path(__file__).resolve()), model, isa]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks bits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="append", required=True, help="a checkout's Python; give two")
    parser.add_argument("-m", "--model", action="append", help="a model (repeatable; smollm2)")
    parser.add_argument("--isa", action="append", help="a kernel set (repeatable; avx512, avx2 and plain)")
    options = parser.parse_args(argv)
    if len(options.python) != 2:
        parser.error(f"--python was given {len(options.python)} times; give it for the two checkouts")
    different: list[str] = []
    count = 0
    for model in options.model or ["smollm2"]:
        for isa in options.isa or ["avx512", "avx2", "plain"]:
            before, after = (answers_of(python, model, isa) for python in options.python)
            names = before.keys() | after.keys()
            changed = sorted(name for name in names if before.get(name) != after.get(name))
            count += len(names)
            different += [f"{model}, {isa}: {name}" for name in changed]
            print(f"{model}, {isa}: {len(names)} requests, {len(changed)} differ", flush=True)
    for line in different:
        print(f"differs: {line}")
    print(json.dumps({"benchmark": "bits", "requests": count, "different": different}))
    return 1 if different else 0


if __name__ == "__main__":
    print(json.dumps(answers(*sys.argv[1:])))

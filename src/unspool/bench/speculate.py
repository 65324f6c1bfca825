"""Speculation against plain decoding, interleaved, with the answers compared bit for bit.

    unspool bench speculate                                     lookup, on edits, summaries and fresh prose
    unspool bench speculate -m 1.5B.gguf --draft 0.5B.gguf      a draft model, on code prompts
    unspool bench speculate --random llama-8b --device cuda --synthetic 0.5 --synthetic 0.9
                                                                a drafter of known acceptance, beside the formula

Prints for each kind of prompt the rates, their ratio and how many guesses were right, then what a step of k rows costs
against one row (the floor: what checking k - 1 guesses costs). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from unspool.llm import LLM
from unspool.params import SamplingParams
from unspool.weights.shapes import SHAPES

PASSAGE = (
    "The lighthouse keeper climbed the stairs every evening at dusk. He carried a lantern, a flask of tea and a small "
    "brown book in which he wrote down the names of the ships that passed. In forty years he had filled eleven such "
    "books. The first was lost in the flood of the harbour; the other ten stood on a shelf above his bed. On clear "
    "nights he could see the lights of the fishing fleet, and on stormy ones he could see nothing at all, but he wrote "
    "down the weather then, and the hour, and that he had kept the lamp burning."
)
FUNCTION = """def summarise(orders):
    total = 0
    count = 0
    for order in orders:
        if order["status"] == "paid":
            total += order["amount"]
            count += 1
    average = total / count if count else 0
    return {"total": total, "count": count, "average": average}
"""
PROMPTS = {
    "edit": [
        f"Repeat this text exactly, word for word:\n\n{PASSAGE}",
        f"Rewrite this text and change only the word 'tea' to 'coffee':\n\n{PASSAGE}",
        f"Copy this Python function exactly as it is:\n\n```python\n{FUNCTION}```",
        f"Rename total to amount in this function and print the whole function:\n\n```python\n{FUNCTION}```",
    ],
    "summarise": [
        f"Summarise this text in two sentences:\n\n{PASSAGE}",
        f"Explain what this function does, line by line:\n\n```python\n{FUNCTION}```",
    ],
    "plain": [
        "Write a short poem about the sea in winter.",
        "What should I keep in mind when I buy a used bicycle?",
        "Tell me a story about a fox and a clockmaker.",
    ],
    "code": [
        "Write a Python function that checks whether a string is a palindrome, with a docstring and three tests.",
        "Write a Python class for a bank account with deposit, withdraw and balance.",
        "Write a Python script that reads a CSV file and prints the mean of each numeric column.",
        "Write binary search in Python, with comments.",
    ],
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "unspool bench speculate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--draft", help="a draft model; without one, prompt lookup")
    parser.add_argument("--speculate", help='a drafter as the engine names it, e.g. "early-exit:12"')
    parser.add_argument("--kinds", nargs="+", choices=list(PROMPTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    known = parser.add_argument_group("a drafter of known acceptance, on random weights")
    known.add_argument("--synthetic", type=float, action="append", metavar="CHANCE", help="of a guess; repeatable")
    known.add_argument("--random", default="llama-8b", choices=sorted(SHAPES), help="the shape of the weights")
    known.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 6], help="of drafts (2 4 6, and the engine's)")
    known.add_argument("--at-once", type=int, nargs="+", default=[1], help="requests (1)")
    known.add_argument("--context", type=int, default=512, help="tokens of a prompt (512)")
    args = parser.parse_args(argv)
    if args.synthetic:
        from unspool.bench.synthetic import run

        return run(args)
    drafter = args.speculate or (f"model:{args.draft}" if args.draft else "lookup")
    kinds = args.kinds or (["code", "plain"] if args.draft else ["edit", "summarise", "plain"])
    llm = LLM(args.model, device=args.device, kv_tokens=4096, speculate=drafter)
    results: dict[str, Any] = {"model": llm.checkpoint.name, "speculate": drafter, "kinds": {}}
    for kind in kinds:
        results["kinds"][kind] = compare(llm, kind, drafter.partition(":")[0], args)
    results["cost"] = costs(llm)
    print("cost of k rows against one: " + ", ".join(f"{k}: {ratio:.2f}" for k, ratio in results["cost"].items()))
    print(json.dumps(results))
    return 0


def compare(llm: LLM, kind: str, drafter: str, args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"off": [], drafter: []}
    before = (llm.engine.speculation.total.drafted, llm.engine.speculation.total.accepted)
    for round_number in range(args.rounds + 1):  # the first one warms up
        for name, values in rates.items():
            params = SamplingParams(
                max_tokens=args.max_tokens, temperature=args.temperature, seed=1, speculate=name, logprobs=0
            )
            answers, seconds = [], 0.0
            for prompt in PROMPTS[kind]:
                result = llm.chat([{"role": "user", "content": prompt}], params)
                seconds += result.timings.decode
                answers.append((result.token_ids, result.logprobs))
            if name == "off":
                expected = answers
            elif answers != expected:
                raise AssertionError(f"speculation changed an answer of {kind}")
            if round_number:
                values.append(sum(len(ids) - 1 for ids, _ in answers) / seconds)
    plain, fast = (statistics.median(values) for values in rates.values())
    ratio = statistics.median(b / a for a, b in zip(*rates.values(), strict=True))
    total = llm.engine.speculation.total
    drafted, accepted = total.drafted - before[0], total.accepted - before[1]
    print(
        f"{kind:<10} plain {plain:6.1f} tokens/s   {drafter} {fast:6.1f}   ratio {ratio:.2f}   "
        f"{accepted:,} of {drafted:,} guesses right; every answer the same"
    )
    return {"plain": plain, "speculative": fast, "ratio": ratio, "drafted": drafted, "accepted": accepted}


def costs(llm: LLM) -> dict[int, float]:
    """Seconds of a step of k rows over those of one: what checking k - 1 guesses costs."""
    from unspool.engine.plan import Plan, Work

    block = llm.engine.scheduler.blocks.allocate()
    seconds = {}
    for rows in (1, 2, 3, 4, 6, 8, 12, 16):
        plan = Plan((Work(0, 0, (1,) * rows, (block,), rows, rows),))
        times = []
        for _ in range(30):
            start = time.perf_counter()
            llm.engine.runner.run(plan)
            times.append(time.perf_counter() - start)
        seconds[rows] = statistics.median(times)
    llm.engine.scheduler.blocks.release([block])
    return {rows: value / seconds[1] for rows, value in seconds.items()}

"""Speculation against plain decoding, interleaved, with the answers compared bit for bit.

    unspool bench speculate                                     lookup, on edits, summaries and fresh prose
    unspool bench speculate -m 1.5B.gguf --draft 0.5B.gguf      a draft model, on code and fresh prose
    unspool bench speculate --speculate early-exit:20           the model's own first layers
    unspool bench speculate --random llama-8b --device cuda --synthetic 0.5 --synthetic 0.9
                                                                a drafter of known acceptance, beside the formula

Each prompt is answered with and without, one right after the other, with drafts by each of the engine's drafters; a
ratio is taken of the times of a round, and the median of the rounds is shown. A measurement during which others took
processor time is made again. The floor comes last: what a step of k rows costs against one row, and what a guess costs.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from unspool.llm import LLM
from unspool.models.shapes import SHAPES
from unspool.params import SamplingParams
from unspool.quiet import Watch
from unspool.reporting import Run, add_output, check_plot, figure, print_table, progress

DISTURBED = 0.08  # cores that others keep busy
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
    args = make_parser().parse_args(argv)
    check_plot(args.plot)
    run = Run("speculate", argv, plot=args.plot)
    result: dict[str, Any] = {}
    interrupted = False
    try:
        if args.synthetic:
            from unspool.bench import synthetic

            synthetic.measure(args, result)
        else:
            measure(args, result)
    except KeyboardInterrupt:
        interrupted = True
    if args.plot is not None and (result.get("kinds") or result.get("rows")):
        draw(result, args)
    return run.finish(result, interrupted=interrupted)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "unspool bench speculate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--draft", help="a draft model; without one, prompt lookup")
    parser.add_argument("--speculate", help='a drafter as the engine names it, e.g. "early-exit:12"')
    parser.add_argument("--only", help="one of the engine's drafters (all)")
    parser.add_argument("--kinds", nargs="+", choices=list(PROMPTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1], help="requests in the engine at a time (1)")
    known = parser.add_argument_group("a drafter of known acceptance, on random weights")
    known.add_argument("--synthetic", type=float, action="append", metavar="CHANCE", help="of a guess; repeatable")
    known.add_argument("--random", default="llama-8b", choices=sorted(SHAPES), help="the shape of the weights")
    known.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 6], help="of drafts (2 4 6, and the engine's)")
    known.add_argument("--context", type=int, default=512, help="tokens of a prompt (512)")
    add_output(parser)
    return parser


# Work ---------------------------------------------------------------------------------------------------------------
def measure(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Every kind of prompts, then the floor; `result` has what is done."""
    drafter = args.speculate or (f"model:{args.draft}" if args.draft else "lookup")
    kinds = args.kinds or (["code", "plain"] if args.draft else ["edit", "summarise", "plain"])
    llm = LLM(args.model, device=args.device, kv_tokens=8192, speculate=drafter)
    result |= {"model": llm.checkpoint.name, "speculate": drafter, "temperature": args.temperature, "kinds": []}
    try:
        for kind in kinds:
            for at_once in args.at_once:
                result["kinds"].append(compare(llm, kind, at_once, args))
    finally:
        report(result["kinds"])
    result["cost"] = costs(llm)
    print("cost of k rows against one: " + ", ".join(f"{k}: {ratio:.2f}" for k, ratio in result["cost"].items()))
    result["guess"] = guess_costs(llm)
    for name, ratio in result["guess"].items():
        print(f"cost of a guess by {name} against a step of one row: {ratio:.2f}")


def compare(llm: LLM, kind: str, at_once: int, args: argparse.Namespace) -> dict[str, Any]:
    """One kind of prompts, off and with each drafter; with several at once the prompts are repeated to fill the engine,
    each with a seed of its own."""
    names = ["off", *([args.only] if args.only else llm.engine.speculation.drafters)]
    work = [[prompt] for prompt in PROMPTS[kind]]
    if at_once > 1:
        work = [[PROMPTS[kind][i % len(PROMPTS[kind])] for i in range(at_once)]]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    counts = {name: [0, 0] for name in names}
    num_tokens = disturbed = 0
    with progress(label_of(kind, at_once), args.rounds + 1) as shown:
        for round_number in range(args.rounds + 1):  # the first one warms up
            taken, num_tokens = dict.fromkeys(names, 0.0), 0
            for prompts in work:
                expected = None
                for name in names:
                    answers, best, others = quietly(llm, prompts, name, counts[name], args)
                    taken[name] += best
                    disturbed += others > DISTURBED
                    expected = expected or answers
                    if answers != expected:
                        raise AssertionError(f"speculation by {name} changed an answer of {kind}")
                num_tokens += sum(len(ids) - 1 for ids, _ in expected or ())
            if round_number:
                for name in names:
                    seconds[name].append(taken[name])
            shown(round_number + 1)
    return row_of(kind, at_once, seconds, counts, num_tokens, disturbed)


def label_of(kind: str, at_once: int) -> str:
    return kind if at_once == 1 else f"{kind}, {at_once} at once"


def quietly(
    llm: LLM, prompts: Sequence[str], name: str, counts: list[int], args: argparse.Namespace
) -> tuple[list[Any], float, float]:
    """Answers, their seconds, and how many cores others kept busy meanwhile: the least disturbed of up to three."""
    best: tuple[list[Any], float, float] | None = None
    for _ in range(3):
        before, watch = llm.engine.speculation.total, Watch()
        answers, seconds = answer(llm, prompts, name, args)
        others = watch.others()
        if best is None or others < best[2]:
            best = answers, seconds, others
        total = llm.engine.speculation.total
        counts[0] += total.drafted - before.drafted
        counts[1] += total.accepted - before.accepted
        if others <= DISTURBED:
            break
    assert best is not None
    return best


def answer(llm: LLM, prompts: Sequence[str], name: str, args: argparse.Namespace) -> tuple[list[Any], float]:
    """Seconds from the first token (of all) to the last."""
    ids = [llm.render([{"role": "user", "content": prompt}]) for prompt in prompts]
    llm.engine.scheduler.blocks.clear_cache()
    params = [
        SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=1 + i, speculate=name, logprobs=0)
        for i in range(len(ids))
    ]
    results = llm.generate(ids, params)
    taken = max(r.timings.total for r in results) - max(r.timings.first_token or 0.0 for r in results)
    return [(result.token_ids, result.logprobs) for result in results], taken


def row_of(
    kind: str,
    at_once: int,
    seconds: Mapping[str, Sequence[float]],
    counts: Mapping[str, Sequence[int]],
    num_tokens: int,
    disturbed: int,
) -> dict[str, Any]:
    plain = num_tokens / statistics.median(seconds["off"])
    rows = {}
    for name, values in seconds.items():
        if name == "off":
            continue
        ratios = sorted(a / b for a, b in zip(seconds["off"], values, strict=True))
        rate, ratio = num_tokens / statistics.median(values), statistics.median(ratios)
        drafted, accepted = counts[name]
        rows[name] = {"rate": rate, "ratio": ratio, "ratios": ratios, "drafted": drafted, "accepted": accepted}
    return {"kind": kind, "at_once": at_once, "plain": plain, "drafters": rows, "disturbed": disturbed}


# Reporting ----------------------------------------------------------------------------------------------------------
def report(kinds: Sequence[Mapping[str, Any]]) -> None:
    table = []
    for each in kinds:
        for name, row in each["drafters"].items():
            low, high = row["ratios"][0], row["ratios"][-1]
            table.append([
                label_of(each["kind"], each["at_once"]), each["plain"], name, row["rate"], row["ratio"],
                f"{low:.2f} to {high:.2f}", row["accepted"], row["drafted"], each["disturbed"],
            ])  # fmt: skip
    titles = ["prompts", "plain, tokens/s", "drafter", "tokens/s", "ratio", "of the rounds", "right", "guesses"]
    print_table([*titles, "disturbed"], table)
    if kinds:
        print("every answer was the same with and without")


def draw(result: Mapping[str, Any], args: argparse.Namespace) -> None:
    """The speed with drafts over the plain one: by kind of prompts, or, of a known drafter, by length of the drafts."""
    name = result.get("model", result.get("shape"))
    with figure(args.plot, title=f"{name}: with drafts over without", x="", y="ratio of speeds") as axes:
        axes.axhline(1, color="gray", linestyle=":")
        if "kinds" in result:
            labels = [label_of(each["kind"], each["at_once"]) for each in result["kinds"]]
            for drafter in dict.fromkeys(name for each in result["kinds"] for name in each["drafters"]):
                ratios = [each["drafters"][drafter]["ratio"] for each in result["kinds"]]
                axes.plot(labels, ratios, marker="o", linestyle="", label=drafter)
            return
        for row in result["rows"]:
            for chance in dict.fromkeys(draft["chance"] for draft in row["drafts"]):
                own = [draft for draft in row["drafts"] if draft["chance"] == chance and draft["length"] is not None]
                label = f"{chance:.0%} right, {row['at_once']} at once"
                [line] = axes.plot([each["length"] for each in own], [each["measured"] for each in own], marker="o",
                                   label=label)  # fmt: skip
                axes.plot([each["length"] for each in own], [each["formula"] for each in own], linestyle="--",
                          color=line.get_color())  # fmt: skip
        axes.set_xlabel("tokens of a draft (dashed: by the formula)")


# The floor ----------------------------------------------------------------------------------------------------------
def costs(llm: LLM) -> dict[int, float]:
    """Seconds of a step of k rows over those of one: what checking k - 1 guesses costs."""
    from unspool.bench.synthetic import step_seconds

    seconds = {rows: step_seconds(llm.engine, 1, rows, 200) for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16)}
    return {rows: value / seconds[1] for rows, value in seconds.items()}


def guess_costs(llm: LLM) -> dict[str, float]:
    from unspool.bench.synthetic import step_seconds

    plain = step_seconds(llm.engine, 1, 1, 200)
    return {name: drafter.seconds(1) / plain for name, drafter in llm.engine.speculation.drafters.items()}

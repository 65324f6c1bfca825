"""Error accumulation: how surprising each next token is to the model, in a text of others and in its own.

    unspool eval drift book.txt --plot drift.svg
    unspool eval drift book.txt --temperature 0 0.7 1 1.3 --windows 32 --length 384

Places of a reference text are drawn. From each the model reads --prefix tokens; then it is given the reference's next
tokens one by one (teacher forcing), or goes on with its own (free running) at several temperatures. Surprise is the
number of bits by which the model did not expect a token, -log2 of its probability before temperature and filters. At
temperature 1 a model's own text is about as surprising as it expects its text to be; where that falls it repeats
itself, where it grows one unlikely token makes the next ones likelier. "late less early" is the last quarter less the
first, of the same places, with an interval that holds 95% of the means of resampled places. The last line is JSON.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from unspool.errors import RequestError
from unspool.evaluation.running import open_model
from unspool.evaluation.statistics import bootstrap, paired
from unspool.params import SamplingParams
from unspool.reporting import Journal, Run, add_model, add_output, check_plot, figure, print_table, progress

if TYPE_CHECKING:
    from unspool.llm import LLM

BUCKETS = 16  # of positions, in the table and the plot
AT_ONCE = 16  # windows
REFERENCE = "reference"


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if min(options.prefix, options.windows) < 1 or options.length < BUCKETS:
        parser.error(f"--prefix and --windows are at least 1, --length at least {BUCKETS}")
    for temperature in options.temperature:
        SamplingParams(temperature=temperature)  # refuses what is out of range
    check_plot(options.plot)
    text = options.file.expanduser().read_text("utf-8", errors="replace")
    run = Run("drift", argv, plot=options.plot, group="eval")
    llm = open_model(options)
    head = {name: getattr(options, name) for name in ("prefix", "length", "windows", "seed")}
    journal = Journal(options.keep, head | {"model": llm.checkpoint.name, "file": str(options.file)})
    interrupted = False
    try:
        windows = windows_of(llm, text, options)
        with progress("windows", len(windows) * (1 + len(options.temperature))) as shown:
            for done in measure(llm, windows, options, journal):
                shown(done)
    except KeyboardInterrupt:
        interrupted = True
        journal.note_interrupted()
    finally:
        llm.close()
    rows = rows_of(journal, options)
    report(rows)
    if options.plot is not None and rows:
        draw(rows, options, llm.checkpoint.name)
    result = {"model": llm.checkpoint.name, "kernels": llm.receipt(0).kernels, **head, "rows": rows}
    return run.finish(result, interrupted=interrupted)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "unspool eval drift", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a reference text in UTF-8")
    parser.add_argument("--prefix", type=int, default=64, metavar="N", help="tokens that are read first (64)")
    parser.add_argument("--length", type=int, default=256, metavar="N", help="tokens that are measured (256)")
    parser.add_argument("--windows", type=int, default=24, metavar="N", help="places in the text (24)")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 0.7, 1.0, 1.3], metavar="T", help="(0 0.7 1 1.3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the places and the draws (0)")
    add_model(parser)
    add_output(parser, resumable=True)
    return parser


def windows_of(llm: LLM, text: str, options: argparse.Namespace) -> list[list[int]]:
    """Token ids of each place: the prefix and what follows it."""
    size = options.prefix + options.length
    if size >= llm.engine.context_length:
        raise RequestError(f"--prefix and --length are {size:,} tokens; the context is {llm.engine.context_length:,}")
    tokens = llm.encode(text[: 40 * size * options.windows])  # no more of a large file than is needed
    if len(tokens) < size:
        raise RequestError(f"the text has {len(tokens):,} tokens; {size:,} are needed")
    starts = sorted(random.Random(options.seed).choices(range(len(tokens) - size + 1), k=options.windows))
    return [tokens[start : start + size] for start in starts]


def name_of(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"t={temperature:g}"


def measure(
    llm: LLM, windows: Sequence[Sequence[int]], options: argparse.Namespace, journal: Journal
) -> Iterator[int]:
    """Add what the journal does not have: for each way and each window the bits of every position."""
    known = {(item["way"], item["window"]) for item in journal.items}
    yield len(known)
    for temperature in (None, *options.temperature):
        way = REFERENCE if temperature is None else name_of(temperature)
        left = [index for index in range(len(windows)) if (way, index) not in known]
        for start in range(0, len(left), AT_ONCE):
            some = left[start : start + AT_ONCE]
            found = _bits(llm, [windows[index] for index in some], temperature, options, some)
            for index, bits in zip(some, found, strict=True):
                journal.add({"way": way, "window": index, "bits": [round(value, 4) for value in bits]})
            yield len(journal.items)


def _bits(
    llm: LLM, windows: Sequence[Sequence[int]], temperature: float | None, options: argparse.Namespace,
    numbers: Sequence[int],
) -> list[list[float]]:  # fmt: skip
    if temperature is None:
        scored = llm.score_many(windows)
        return [[_surprise(token.logprob if token else None) for token in each[options.prefix :]] for each in scored]
    params = [
        SamplingParams(
            temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, logprobs=0,
            max_tokens=options.length, ignore_eos=True, seed=options.seed + number + 1,
        )
        for number in numbers
    ]  # fmt: skip
    results = llm.generate([each[: options.prefix] for each in windows], params, progress=False)
    return [[_surprise(token.logprob) for token in result.tokens] for result in results]


def _surprise(logprob: float | None) -> float:
    assert logprob is not None  # it was asked for
    return -logprob / math.log(2)


# Reporting ----------------------------------------------------------------------------------------------------------
def rows_of(journal: Journal, options: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[str, list[list[float]]] = {}
    for item in sorted(journal.items, key=lambda item: item["window"]):
        found.setdefault(item["way"], []).append(item["bits"])
    quarter = options.length // 4
    edges = [options.length * number // BUCKETS for number in range(BUCKETS + 1)]
    ways = [way for way in (REFERENCE, *map(name_of, options.temperature)) if way in found]
    return [
        {
            "way": way,
            "windows": len(found[way]),
            "bits": bootstrap([fmean(bits) for bits in found[way]]).as_dict(),
            "late_less_early": paired(
                [fmean(bits[-quarter:]) for bits in found[way]], [fmean(bits[:quarter]) for bits in found[way]]
            ).as_dict(),
            "starts": edges[:-1],
            "by_position": [
                fmean(fmean(bits[start:end]) for bits in found[way]) for start, end in pairwise(edges)
            ],
        }
        for way in ways
    ]  # fmt: skip


def report(rows: Sequence[dict[str, Any]]) -> None:
    table = [
        [row["way"], row["windows"], _interval(row["bits"]), *row["by_position"][:: BUCKETS // 4],
         row["by_position"][-1], _interval(row["late_less_early"])]
        for row in rows
    ]  # fmt: skip
    places = [f"at {start}" for start in (rows[0]["starts"][:: BUCKETS // 4] if rows else ())]
    print("bits of surprise a token")
    print_table(["", "places", "mean", *places, "at the end", "late less early"], table)


def _interval(estimate: dict[str, float]) -> str:
    return f"{estimate['mean']:.2f} [{estimate['low']:.2f}, {estimate['high']:.2f}]"


def draw(rows: Sequence[dict[str, Any]], options: argparse.Namespace, model: str) -> None:
    title = f"{model}: surprise after {options.prefix} tokens of the reference"
    with figure(options.plot, title=title, x="tokens that were written", y="bits a token") as axes:
        half = options.length / BUCKETS / 2
        for row in rows:
            style = {"color": "black", "linewidth": 2} if row["way"] == REFERENCE else {}
            label = "reference text (teacher forcing)" if row["way"] == REFERENCE else f"own text, {row['way']}"
            axes.plot([start + half for start in row["starts"]], row["by_position"], label=label, **style)
        axes.set_ylim(bottom=0)

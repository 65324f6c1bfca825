"""A small grid over temperature, top-p and min-p on prompts of your own, with a scorer of your own.

    unspool tune prompts.txt --scorer json
    unspool tune prompts.txt --scorer 'regex:^(yes|no)$' --temperature 0 0.5 1 --seeds 4
    unspool tune prompts.jsonl --scorer python:score.py:grade --min-p 0 0.05 0.1 --plot tune.svg
    unspool tune prompts.txt --scorer judge:http://127.0.0.1:8000

PROMPTS has a prompt on each line, or is a task file (.jsonl, docs/evaluation.md), whose lines may say themselves what
a right answer is. Prompts go through the model's chat template unless --raw is given. A scorer gives 0 to 1: `json`
wants JSON, `regex` a match, `python` calls function(prompt, answer), `judge` asks another model. The table is sorted by
score; "less best" is the difference from the best setting on the same prompts, and intervals hold 95% of the means of
resampled prompts: settings whose interval has 0 in it cannot be distinguished from the best. The last line is JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from unspool.errors import RequestError
from unspool.evaluation.compare import summarize
from unspool.evaluation.grid import PLAIN, Answer, Form, Grid, Job, Setting, jobs_of, journal_head
from unspool.evaluation.running import add_run, open_model, seeds_of
from unspool.evaluation.sampling import interval
from unspool.evaluation.sandbox import require_sandbox
from unspool.evaluation.scorers import Scorer, TaskScorer, scorer_of
from unspool.evaluation.tasks import CHECKS, MAX_TOKENS, Item, open_task, read_items
from unspool.params import SamplingParams
from unspool.reporting import Journal, Run, add_model, add_output, check_plot, figure, print_table, progress


def main(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    check_plot(options.plot)
    settings = settings_of(options)
    items, scorer = prompts_of(options.prompts, options), scorer_for(options)
    run = Run("tune", argv, plot=options.plot, group="")
    llm = open_model(options)
    form: Form = "raw" if options.raw or llm.template is None else "chat"
    head = {"model": llm.checkpoint.name, "kernels": llm.receipt(0).kernels, "scorer": options.scorer, "form": form}
    more = {"scorer": options.scorer, "form": form, "max_tokens": options.max_tokens}
    journal = Journal(options.keep, journal_head(llm, **more))
    grid = Grid(llm, scorer, journal)
    jobs = jobs_of("prompts", items, settings, seeds_of(options), form=form)
    interrupted = False
    try:
        with progress("answers", len(jobs)) as shown:
            grid.run(jobs, shown)
    except KeyboardInterrupt:
        interrupted = True
        journal.note_interrupted()
    finally:
        llm.close()
    rows = rows_of(grid, jobs, settings)
    report(rows)
    if options.plot is not None and rows:
        draw(rows, options, llm.checkpoint.name)
    return run.finish({**head, "items": len(items), "seeds": options.seeds, "rows": rows}, interrupted=interrupted)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("unspool tune", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("prompts", metavar="PROMPTS", type=Path, help="a prompt a line, or a task file (.jsonl)")
    parser.add_argument("--scorer", metavar="HOW", help="json, regex:PATTERN, python:FILE:FUNCTION or judge:URL")
    parser.add_argument("--judge-key", metavar="KEY", help="the judge's API key")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.5, 1.0], metavar="T", help="(0 0.5 1)")
    parser.add_argument("--top-p", type=float, nargs="+", default=[1.0, 0.9], metavar="P", help="(1 0.9)")
    parser.add_argument("--min-p", type=float, nargs="+", default=[0.0, 0.1], metavar="P", help="(0 0.1)")
    parser.add_argument("--raw", action="store_true", help="continue the prompts as they are")
    add_run(parser)
    add_model(parser)
    add_output(parser, resumable=True)
    return parser


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """The grid; a greedy answer does not depend on the other values, so there is one of it."""
    found: dict[str, Setting] = {}
    for temperature, top_p, min_p in product(options.temperature, options.top_p, options.min_p):
        values = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
        SamplingParams(**values)  # refuses what is out of range
        name = "greedy" if temperature == 0 else f"t={temperature:g}"
        if temperature:
            name += (f",p={top_p:g}" if top_p != 1 else "") + (f",m={min_p:g}" if min_p else "")
        found.setdefault(name, Setting(name, PLAIN | values))
    return list(found.values())


def prompts_of(path: Path, options: argparse.Namespace) -> list[Item]:
    most = options.max_tokens or MAX_TOKENS
    if path.suffix == ".jsonl":
        items = read_items(open_task(path), options.limit, is_checked=options.scorer is None)
        if options.scorer is None and any("tests" in item.doc for item in items):
            require_sandbox()
        return items
    if options.scorer is None:
        raise RequestError(f"say with --scorer what a good answer is, or give a task file that has {', '.join(CHECKS)}",
                           "scorer")  # fmt: skip
    lines = [line.strip() for line in path.expanduser().read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise RequestError(f"{path} has no prompt", "prompts")
    return [Item(str(number), line, max_tokens=most) for number, line in enumerate(lines[: options.limit], 1)]


def scorer_for(options: argparse.Namespace) -> Scorer:
    return TaskScorer() if options.scorer is None else scorer_of(options.scorer, key=options.judge_key)


def rows_of(grid: Grid, jobs: Sequence[Job], settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """The best first; each beside the best, on the prompts that both have."""
    found: dict[str, list[Answer]] = {}
    for job in jobs:
        if job.key in grid.answers:
            found.setdefault(job.setting.name, []).append(grid.answers[job.key])
    alone = {one.name: summarize("prompts", one, found[one.name], ()) for one in settings if one.name in found}
    if not alone:
        return []
    best = max(alone, key=lambda name: alone[name]["score"]["mean"])
    rows = [summarize("prompts", one, found[one.name], found[best]) for one in settings if one.name in found]
    return sorted(rows, key=lambda row: -row["score"]["mean"])


# Reporting ----------------------------------------------------------------------------------------------------------
def report(rows: Sequence[dict[str, Any]]) -> None:
    table = [
        [
            row["setting"], row["answers"], interval(row["score"]), interval(row["difference"], sign=True),
            interval(row["loops"]), 100 * row["cut"], row["tokens"],
        ]
        for row in rows
    ]  # fmt: skip
    print("shares in percent, with 95% intervals")
    print_table(["setting", "answers", "score", "less best", "loops", "cut", "tokens"], table)
    if rows:
        tied = [row["setting"] for row in rows if row["difference"]["high"] >= 0]
        print(f"best: {tied[0]}" + (f"; not to be told from it: {', '.join(tied[1:])}" if len(tied) > 1 else ""))


def draw(rows: Sequence[dict[str, Any]], options: argparse.Namespace, model: str) -> None:
    with figure(options.plot, title=f"{model}, {options.seeds} seeds, 95% intervals", x="", y="score, percent") as axes:
        for place, row in enumerate(rows):
            mean, low, high = (100 * row["score"][name] for name in ("mean", "low", "high"))
            axes.errorbar([place], [mean], yerr=[[mean - low], [high - mean]], marker="o", capsize=3, color="C0")
        axes.set_xticks(range(len(rows)), [row["setting"] for row in rows], rotation=40, ha="right")

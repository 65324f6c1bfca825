"""Greedy against sampling on the same items: scores, changed answers, best of several, and answers that loop.

    unspool eval sampling humaneval --limit 40 --seeds 4
    unspool eval sampling gsm8k arithmetic --setting greedy t=0.7 t=1,p=0.9 t=1.5,m=0.1 --plot sampling.svg
    unspool eval sampling open open_list --form raw chat --setting greedy t=1 greedy,rep=1.2

Leaderboards are made with greedy decoding, products sample. Every setting answers the same items; a sampled one does
so with several seeds. The first setting is the baseline: differences are of the same items, intervals hold 95% of the
means of resampled items. "best of" is the expected best score of so many answers; "likeliest" takes the answer with the
best mean logprob, "majority" the most frequent one. An answer loops if it ends in a passage of up to 64 tokens that
comes four times in a row, 48 tokens or more in all; it is ended there. `open` and `open_list` have no right answers and
show loops alone. The last line is JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from unspool.evaluation.compare import summarize
from unspool.evaluation.grid import (
    Answer,
    Form,
    Grid,
    Job,
    Setting,
    jobs_of,
    journal_head,
    setting,
    with_max_tokens,
)
from unspool.evaluation.open_prompts import OPEN, open_items
from unspool.evaluation.packages import SOURCES, find_task
from unspool.evaluation.running import add_run, open_model, seeds_of
from unspool.evaluation.sandbox import require_sandbox
from unspool.evaluation.scorers import TaskScorer
from unspool.evaluation.tasks import Item, read_items
from unspool.reporting import Journal, Run, add_model, add_output, check_plot, figures, print_table, progress

ANSWERED = ("gsm8k", "arithmetic", "lambada_word", "humaneval", "mbpp")
SETTINGS = ("greedy", "t=0.3", "t=0.7", "t=1", "t=1.5")


def main(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    settings = [setting(text) for text in options.setting]
    check_plot(options.plot)
    tasks = {name: items_of(name, options) for name in options.task}
    run = Run("sampling", argv, plot=options.plot, group="eval")
    llm = open_model(options)
    journal = Journal(options.keep, journal_head(llm))
    grid = Grid(llm, TaskScorer(), journal)
    jobs = [
        job for form in options.form for name, items in tasks.items()
        for job in jobs_of(name, items, settings, seeds_of(options), form=form)
    ]  # fmt: skip
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
    result = {"model": llm.checkpoint.name, "kernels": llm.receipt(0).kernels, "seeds": options.seeds, "rows": rows}
    return run.finish(result, interrupted=interrupted)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "unspool eval sampling", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    answered = ", ".join(name for name in SOURCES if name in ANSWERED)
    parser.add_argument("task", nargs="+", help=f"{answered}, {', '.join(OPEN)}, or a task file (docs/evaluation.md)")
    parser.add_argument(
        "--setting", nargs="+", default=list(SETTINGS), metavar="SETTING",
        help="greedy, or values: t(emperature), p, k, m(in_p), rep, pres, freq, dry, as in t=1,p=0.9",
    )  # fmt: skip
    parser.add_argument("--form", nargs="+", choices=["raw", "chat"], default=["raw"], help="of prompts (raw)")
    add_run(parser)
    add_model(parser)
    add_output(parser, resumable=True)
    return parser


def items_of(name: str, options: argparse.Namespace) -> list[Item]:
    items = open_items(name, options.limit) if name in OPEN else read_items(find_task(name), options.limit)
    if any("tests" in item.doc for item in items):
        require_sandbox()
    return with_max_tokens(items, options.max_tokens)


def rows_of(grid: Grid, jobs: Sequence[Job], settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Of the answers that there are, in the order of tasks and settings."""
    found: dict[tuple[Form, str], dict[str, list[Answer]]] = {}
    for job in jobs:
        if job.key in grid.answers:
            of_settings = found.setdefault((job.form, job.task), {})
            of_settings.setdefault(job.setting.name, []).append(grid.answers[job.key])
    return [
        {"form": form, **summarize(task, each, answers[each.name], answers.get(settings[0].name, []))}
        for (form, task), answers in found.items()
        for each in settings
        if each.name in answers
    ]


# Reporting ----------------------------------------------------------------------------------------------------------
def report(rows: Sequence[dict[str, Any]]) -> None:
    for form, task in dict.fromkeys((row["form"], row["task"]) for row in rows):
        own = [row for row in rows if (row["form"], row["task"]) == (form, task)]
        print(f"{task} ({form}), {own[0]['items']} items; shares in percent, with 95% intervals")
        print_table(_titles(own), [_cells(row) for row in own])
        print()


def _titles(rows: Sequence[dict[str, Any]]) -> list[str]:
    titles = ["setting", "answers", "loops", "cut", "tokens"]
    if rows[0]["score"] is None:
        return titles
    most = max(int(size) for row in rows for size in row["best_of"])
    return [*titles, "score", "less baseline", "changed", "gained", "lost", f"best of {most}", "likeliest", "majority"]


def _cells(row: dict[str, Any]) -> list[Any]:
    cells = [row["setting"], row["answers"], interval(row["loops"]), 100 * row["cut"], row["tokens"]]
    if row["score"] is None:
        return cells
    changed = row["changed"]
    most = max(row["best_of"], key=int)
    shares = [100 * changed[name] / changed["answers"] if changed["answers"] else None
              for name in ("other", "gained", "lost")]  # fmt: skip
    return [
        *cells, interval(row["score"]), interval(row["difference"], sign=True), *shares,
        interval(row["best_of"][most]), 100 * row["likeliest"]["mean"], 100 * row["majority"]["mean"],
    ]  # fmt: skip


def interval(estimate: dict[str, float] | None, *, sign: bool = False) -> str:
    """`23.4 [18.0, 29.1]`, in percent."""
    if estimate is None:
        return "–"
    mean, low, high = (100 * estimate[name] for name in ("mean", "low", "high"))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" if sign else f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def draw(rows: Sequence[dict[str, Any]], options: argparse.Namespace, model: str) -> None:
    names = list(dict.fromkeys(row["setting"] for row in rows))
    scored = [row for row in rows if row["score"] is not None]
    parts: list[tuple[str, str, Sequence[dict[str, Any]]]] = [("score", "score", scored)] if scored else []
    if not scored or any(row["loops"]["mean"] for row in rows):
        parts.append(("loops", "answers that loop", rows))
    panels = [(title, "", "percent") for _, title, _ in parts]
    with figures(options.plot, panels, title=f"{model}, {options.seeds} seeds, 95% intervals") as grid:
        for axes, (what, _, some) in zip(grid, parts, strict=True):
            series = list(dict.fromkeys((row["form"], row["task"]) for row in some))
            for index, (form, task) in enumerate(series):
                own = {row["setting"]: row[what] for row in some if (row["form"], row["task"]) == (form, task)}
                label = task if len(options.form) == 1 else f"{task}, {form}"
                _errors(axes, names, own, label, 0.1 * (index - (len(series) - 1) / 2))
            axes.set_xticks(range(len(names)), names, rotation=30, ha="right")


def _errors(axes: Any, names: Sequence[str], own: dict[str, dict[str, float]], label: str, aside: float) -> None:
    """One series; `aside` moves it, so that intervals do not lie on one another."""
    places = [place for place, name in enumerate(names) if name in own]
    means = [100 * own[names[place]]["mean"] for place in places]
    below = [mean - 100 * own[names[place]]["low"] for place, mean in zip(places, means, strict=True)]
    above = [100 * own[names[place]]["high"] - mean for place, mean in zip(places, means, strict=True)]
    axes.errorbar([place + aside for place in places], means, yerr=[below, above], marker="o", capsize=3, label=label)

"""Seven claims about greedy decoding and sampling, checked on small models within a budget of processor time.

    python -m benchmarks claims --qwen-small 0.5b.gguf --qwen-large 1.5b.gguf --keep claims --plot claims.svg

The models are SmolLM2-135M, and Qwen2.5-Coder 0.5B and 1.5B where their files are given. Each claim is compared with
differences of the same items, with intervals that hold 95% of the means of resampled items. It holds, it does not, or
so few items cannot decide; what a model cannot do at all is "not testable here". `--keep` is a directory: the command
goes on from it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from unspool.evaluation.compare import by_item
from unspool.evaluation.grid import Answer, Form, Grid, jobs_of, journal_head, setting, with_max_tokens
from unspool.evaluation.open_prompts import OPEN, open_items
from unspool.evaluation.packages import find_task
from unspool.evaluation.scorers import TaskScorer
from unspool.evaluation.statistics import best_of, bootstrap, paired
from unspool.evaluation.tasks import read_items
from unspool.llm import LLM
from unspool.reporting import Journal, check_plot, figures, print_table, progress
from unspool.weights.store import resolve

SMOL, SMALL, LARGE = "SmolLM2-135M", "Qwen2.5-Coder-0.5B", "Qwen2.5-Coder-1.5B"
LOOPS = ("greedy", "t=0.7", "t=1", "greedy,pres=1.5", "t=0.7,pres=1.5", "greedy,rep=1.3", "greedy,dry=0.8")
HOT = ("t=1.5", "t=1.5,p=0.9", "t=1.5,m=0.1")
PENALTIES = ("greedy,rep=1.1", "greedy,rep=1.3", "greedy,rep=1.5")


@dataclass(frozen=True)
class Study:
    model: str
    task: str
    settings: tuple[str, ...]
    limit: int
    seeds: int = 1
    forms: tuple[Form, ...] = ("raw",)
    max_tokens: int | None = None


BOTH: tuple[Form, ...] = ("raw", "chat")
STUDIES = (
    Study(SMOL, "arithmetic", ("greedy", "t=0.3", "t=0.7", "t=1", *HOT), 200, 4),
    Study(SMOL, "lambada_word", ("greedy", "t=0.3", "t=0.7", "t=1", *HOT), 200, 4),
    Study(SMALL, "humaneval", ("greedy", "t=0.7", "t=1"), 40, 4, max_tokens=192),
    Study(SMALL, "humaneval", PENALTIES, 40, max_tokens=192),
    Study(LARGE, "humaneval", ("greedy", "t=1", "greedy,rep=1.3"), 40, 2, max_tokens=192),
    Study(SMOL, "open", LOOPS, 24, 4, BOTH, 256),
    Study(SMOL, "open_list", LOOPS, 24, 4, BOTH, 256),
    Study(SMALL, "humaneval", HOT, 40, 2, max_tokens=192),
    Study(SMALL, "gsm8k", ("greedy", "t=0.7", "t=1"), 24, 3, max_tokens=160),
    Study(SMALL, "open", ("greedy", "t=1", "greedy,pres=1.5"), 16, 2, BOTH, 256),
    Study(SMALL, "open_list", ("greedy", "t=1", "greedy,pres=1.5"), 16, 2, BOTH, 256),
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks claims", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--qwen-small", metavar="FILE", help="Qwen2.5-Coder-0.5B-Instruct")
    parser.add_argument("--qwen-large", metavar="FILE", help="Qwen2.5-Coder-1.5B-Instruct")
    parser.add_argument("--keep", metavar="DIR", type=Path, required=True, help="where answers are kept")
    parser.add_argument("--minutes", type=float, default=30, metavar="M",
                        help="of processor time for each model, after which no study begins (30; 0: none)")  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=[SMOL, SMALL, LARGE], metavar="MODEL", help="of these alone")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--plot", metavar="FILE", type=Path)
    options = parser.parse_args(argv)
    check_plot(options.plot)
    files = {SMOL: "smollm2", SMALL: options.qwen_small, LARGE: options.qwen_large}
    options.keep.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str, Form, str], list[Answer]] = {}
    try:
        for model in dict.fromkeys(study.model for study in STUDIES):
            if files[model] is not None and (options.only is None or model in options.only):
                run(model, files[model], options, found)
    except KeyboardInterrupt:
        print(f"stopped with Ctrl-C; the same command goes on from {options.keep}", file=sys.stderr)
    seconds = sum(json.loads(file.read_text()) for file in options.keep.glob("*.seconds"))
    claims = Claims(found).all()
    report(claims, found, seconds)
    if options.plot is not None:
        draw(found, options.plot)
    rates = {" ".join(key): {"answers": len(answers), "loops": fmean(each.loops for each in answers),
                             "score": _mean(answers)} for key, answers in found.items()}  # fmt: skip
    print(json.dumps({"benchmark": "claims", "processor_seconds": seconds, "claims": claims, "settings": rates}))
    return 0


def run(model: str, file: str, options: argparse.Namespace, found: dict[Any, list[Answer]]) -> None:
    """Every study of a model, and its answers by task, form and setting."""
    clock = options.keep / f"{model}.seconds"
    spent = json.loads(clock.read_text()) if clock.exists() else 0.0
    with LLM(resolve(file), threads=options.threads) as llm:
        journal = Journal(options.keep / f"{model}.jsonl", journal_head(llm))
        grid = Grid(llm, TaskScorer(), journal)
        for study in (each for each in STUDIES if each.model == model):
            items = open_items(study.task, study.limit) if study.task in OPEN else read_items(
                find_task(study.task), study.limit)  # fmt: skip
            items = with_max_tokens(items, study.max_tokens)
            settings, seeds = [setting(text) for text in study.settings], range(1, study.seeds + 1)
            start = time.process_time()
            for form in study.forms:
                jobs = jobs_of(study.task, items, settings, seeds, form=form)
                try:
                    if spent <= 60 * options.minutes:
                        with progress(f"{model} {study.task} {form}", len(jobs)) as shown:
                            grid.run(jobs, shown)
                finally:
                    known = [grid.answers[job.key] for job in jobs if job.key in grid.answers]
                    for answer in known:
                        found.setdefault((model, answer.task, answer.form, answer.setting), []).append(answer)
                    spent, start = spent + time.process_time() - start, time.process_time()
                    clock.write_text(json.dumps(spent))
                if len(known) < len(jobs):
                    print(f"{model}, {study.task} ({form}): {len(known):,} of {len(jobs):,}, for the budget is used")


def _mean(answers: Sequence[Answer]) -> float | None:
    scores = [answer.score for answer in answers if answer.score is not None]
    return fmean(scores) if scores else None


# The claims ---------------------------------------------------------------------------------------------------------
Values = Mapping[str, float]  # by item


class Claims:
    """What the answers say of each claim: a row for each model and place that can be compared."""

    def __init__(self, found: Mapping[tuple[str, str, Form, str], Sequence[Answer]]) -> None:
        self._found = found
        self._models = [model for model in (SMOL, SMALL, LARGE) if any(key[0] == model for key in found)]
        self.rows: list[dict[str, Any]] = []

    def all(self) -> list[dict[str, Any]]:
        for model in self._models:
            self._loops(model)
        for model in self._models:
            self._scores(model)
        self._best()
        for check in (self._presence, self._penalty, self._lists, self._hot):
            for model in self._models:
                check(model)
        return self.rows

    def _loops(self, model: str) -> None:
        ours, theirs = self._open(model, "greedy"), self._open(model, "t=1")
        self._add("greedy loops 48 times as often as temperature 1", model, "open prompts", "greedy, t=1", ours, theirs,
                  lambda row: "holds in direction" if row["difference"]["low"] > 0 else "cannot be told")  # fmt: skip

    def _scores(self, model: str) -> None:
        def verdict(row: dict[str, Any]) -> str:
            less = row["difference"]
            if row["first"]["high"] < 0.1:
                return "not testable here"
            if less["low"] <= 0 <= less["high"]:
                return "cannot be told"
            return "holds" if less["high"] >= 0.10 and less["low"] <= 0.18 else "does not hold"

        for task in ("arithmetic", "lambada_word", "gsm8k", "humaneval"):
            ours, theirs = self._scored(model, task, "greedy"), self._scored(model, task, "t=1")
            self._add("greedy and sampled scores differ by 10 to 18 points", model, task, "greedy, t=1", ours, theirs,
                      verdict)  # fmt: skip

    def _best(self) -> None:
        large = self._scored(LARGE, "humaneval", "greedy")
        for name in ("greedy", "t=0.7", "t=1"):
            answers = by_item(self._get(SMALL, "humaneval", name))
            size = min(map(len, answers.values()), default=1)
            best = {item: best_of([answer.score or 0.0 for answer in each], size) for item, each in answers.items()}
            self._add("best-of-n closes gaps between model sizes", SMALL, "humaneval",
                      f"0.5B best of {size} at {name}, 1.5B greedy", best, large,
                      lambda row: "a gap" if row["difference"]["high"] < 0 else "no gap to be seen")  # fmt: skip

    def _presence(self, model: str) -> None:
        for base in ("greedy", "t=0.7"):
            ours, theirs = self._open(model, f"{base},pres=1.5"), self._open(model, base)
            self._add("a presence penalty of 1.5 makes repetition worse", model, "open prompts",
                      f"{base} with it, without", ours, theirs, _more)  # fmt: skip

    def _penalty(self, model: str) -> None:
        greedy = self._scored(model, "humaneval", "greedy")
        for name in PENALTIES:
            self._add("a repetition penalty above 1.3 breaks code", model, "humaneval", f"{name}, greedy",
                      self._scored(model, "humaneval", name), greedy,
                      lambda row: "worse" if row["difference"]["high"] < 0 else "cannot be told")  # fmt: skip

    def _lists(self, model: str) -> None:
        for name in ("greedy", "t=1"):
            lists, essays = (self._open(model, name, [task]) for task in ("open_list", "open"))
            as_lists = {key.replace(" open ", " open_list "): value for key, value in essays.items()}
            self._add("numbered lists in a prompt cause loops", model, "open prompts", f"{name}: lists, essays", lists,
                      as_lists, _more)  # fmt: skip

    def _hot(self, model: str) -> None:
        for task in ("arithmetic", "lambada_word", "humaneval"):
            ours, theirs = (self._scored(model, task, name) for name in ("t=1.5,m=0.1", "t=1.5,p=0.9"))
            self._add("min-p keeps quality at temperature 1.5 where top-p does not", model, task,
                      "min-p 0.1, top-p 0.9", ours, theirs, _more)  # fmt: skip

    def _get(self, model: str, task: str, name: str, form: Form = "raw") -> Sequence[Answer]:
        return self._found.get((model, task, form, name), ())

    def _open(self, model: str, name: str, tasks: Sequence[str] = ("open", "open_list")) -> Values:
        """The share of answers that loop, by prompt: topic, task and form."""
        return {
            f"{item} {task} {form}": fmean(answer.loops for answer in answers)
            for task in tasks
            for form in BOTH
            for item, answers in by_item(self._get(model, task, name, form)).items()
        }

    def _scored(self, model: str, task: str, name: str) -> Values:
        answers = by_item(self._get(model, task, name))
        return {item: fmean(answer.score or 0.0 for answer in each) for item, each in answers.items()}

    def _add(
        self, claim: str, model: str, place: str, compared: str, ours: Values, theirs: Values,
        verdict: Callable[[dict[str, Any]], str],
    ) -> None:  # fmt: skip
        """Compare the items that both have, if there are any."""
        shared = [item for item in ours if item in theirs]
        if not shared:
            return
        first, second = [ours[item] for item in shared], [theirs[item] for item in shared]
        row = {
            "claim": claim, "model": model, "place": place, "compared": compared, "items": len(shared),
            "first": bootstrap(first).as_dict(), "second": bootstrap(second).as_dict(),
            "difference": paired(first, second).as_dict(),
        }  # fmt: skip
        self.rows.append(row | {"verdict": verdict(row)})


def _more(row: Mapping[str, Any]) -> str:
    """Whether the first is more than the second."""
    difference = row["difference"]
    return "holds" if difference["low"] > 0 else "does not hold" if difference["high"] < 0 else "cannot be told"


# Reporting ----------------------------------------------------------------------------------------------------------
def report(claims: Sequence[Mapping[str, Any]], found: Mapping[Any, Sequence[Answer]], seconds: float) -> None:
    print(f"{sum(map(len, found.values())):,} answers, {seconds / 60:.1f} minutes of processor time; percent")
    for claim in dict.fromkeys(row["claim"] for row in claims):
        print(f"\n{claim}")
        print_table(
            ["model", "on", "items", "first, second", "first", "second", "difference", "verdict"],
            [[row["model"], row["place"], row["items"], row["compared"], f"{100 * row['first']['mean']:.1f}",
              f"{100 * row['second']['mean']:.1f}",
              "{mean:+.1f} [{low:+.1f}, {high:+.1f}]".format(**{n: 100 * v for n, v in row["difference"].items()}),
              row["verdict"]] for row in claims if row["claim"] == claim],
        )  # fmt: skip


def draw(found: Mapping[tuple[str, str, Form, str], Sequence[Answer]], path: Path) -> None:
    """Scores and loops by temperature."""
    names = ["greedy", "t=0.3", "t=0.7", "t=1", "t=1.5"]
    with figures(path, [("score", "", "percent"), ("answers that loop", "", "percent")]) as (scores, loops):
        for model, task in dict.fromkeys((key[0], key[1]) for key in found):
            for axes, is_score in ((scores, True), (loops, False)):
                if is_score == (task in OPEN):
                    continue
                points = []
                for place, name in enumerate(names):
                    answers = [each for form in BOTH for each in found.get((model, task, form, name), ())]
                    if answers:
                        value = _mean(answers) if is_score else fmean(each.loops for each in answers)
                        points.append((place, 100 * (value or 0.0)))
                axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=f"{model}, {task}")
        for axes in (scores, loops):
            axes.set_xticks(range(len(names)), names)
            axes.set_ylim(bottom=0)

"""Scores of tasks by EleutherAI's lm-eval, computed in this process.

    unspool eval hellaswag arc_easy lambada --limit 300
    unspool eval humaneval -m model.gguf --keep humaneval.jsonl --out humaneval.json
    unspool eval my_task --include my_tasks          lm-eval's own task files (YAML)
    unspool eval hellaswag arc_easy --write tasks    write task files for `lm_eval --include_path tasks`, and leave

Tasks are those of `unspool eval tasks`, files that end in .jsonl, and those below --include. With --keep each answer
is written down at once; the same command goes on from there after Ctrl-C. The last line is JSON, --out writes it to a
file.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unspool.errors import BackendError
from unspool.evaluation.harness_tasks import config_of, write
from unspool.evaluation.packages import find_task
from unspool.evaluation.running import count_of
from unspool.evaluation.sandbox import require_sandbox
from unspool.evaluation.tasks import Task
from unspool.reporting import Run, add_model, print_table

MISSING = "lm-eval is not here: pip install 'unspool[eval]' (eval sampling, eval drift and tune do without it)"


def main(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    if options.write is not None:
        for task in map(find_task, options.task):
            write(task, options.write)
        print(f"wrote {', '.join(options.task)} to {options.write}")
        return 0
    check_installed()
    tasks: list[Task | str] = [
        name if options.include and not _is_ours(name) else find_task(name) for name in options.task
    ]
    if any(isinstance(each, Task) and each.kind == "answer" and "tests" in each.docs(1)[0] for each in tasks):
        require_sandbox()
    run = Run("lm-eval", argv, group="eval")
    found, lm, interrupted = evaluate(tasks, options)
    rows = rows_of(found)
    report(rows)
    result = {"model": lm.llm.checkpoint.name, "kernels": lm.llm.receipt(0).kernels, "lm_eval": version(),
              "limit": options.limit, "tasks": rows}  # fmt: skip
    if options.out is not None:
        options.out.write_text(json.dumps(run.record(result, interrupted=interrupted), indent=1) + "\n", "utf-8")
    return run.finish(result, interrupted=interrupted)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("unspool eval", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", nargs="+", help="`unspool eval tasks` lists them; or a file that ends in .jsonl")
    parser.add_argument("--limit", type=count_of, metavar="N", help="the first N items of each task alone")
    parser.add_argument("--fewshot", type=count_of, metavar="N", help="examples before each item")
    parser.add_argument("--chat", action="store_true", help="through the model's chat template")
    parser.add_argument("--include", metavar="DIR", type=Path, help="a directory of lm-eval's task files")
    parser.add_argument("--tokenizer", metavar="FILE", help="take token ids from this tokenizer.json")
    parser.add_argument("--keep", metavar="FILE", type=Path, help="write each answer to this file, and go on from it")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the result to this file")
    parser.add_argument("--write", metavar="DIR", type=Path, help="write the tasks in lm-eval's form, and leave")
    add_model(parser)
    return parser


def _is_ours(name: str) -> bool:
    from unspool.evaluation.packages import SOURCES

    return name in SOURCES or name.endswith(".jsonl")


def check_installed() -> None:
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise BackendError(MISSING)
    # Read when `datasets` is imported: everything is here, no hub is asked, and the progress that is shown is ours.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")


def version() -> str:
    from importlib.metadata import version as installed

    return installed("lm_eval")


def evaluate(tasks: Sequence[Task | str], options: argparse.Namespace) -> tuple[Mapping[str, Any], Any, bool]:
    """lm-eval's results, the model, and whether it was interrupted."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from unspool.evaluation.harness import UnspoolLM
    from unspool.evaluation.running import open_model

    lm = UnspoolLM(llm=open_model(options), keep=options.keep, tokenizer=options.tokenizer)
    results: dict[str, Any] = {}
    try:
        for task in tasks:  # one by one, so that finished tasks are reported after Ctrl-C
            found = simple_evaluate(
                model=lm, tasks=[task if isinstance(task, str) else config_of(task)], limit=options.limit,
                num_fewshot=options.fewshot, apply_chat_template=options.chat, log_samples=False,
                bootstrap_iters=1000, task_manager=TaskManager(include_path=options.include and str(options.include)),
            )  # fmt: skip
            assert found is not None
            for name, metrics in found["results"].items():
                results[name] = metrics | {"items": found["n-samples"].get(name, {}).get("effective", 0)}
    except KeyboardInterrupt:
        lm.note_interrupted()
        return results, lm, True
    finally:
        lm.llm.close()
    return results, lm, False


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for task, metrics in results.items():
        values: dict[str, Any] = {}
        for key, value in metrics.items():
            name, _, filtered = key.partition(",")
            if not filtered or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{name}_stderr,{filtered}")
            title = name if filtered == "none" else f"{name} ({filtered})"
            values[title] = {"value": value, "stderr": error if isinstance(error, int | float) else None}
        rows.append({"task": task, "items": metrics["items"], "metrics": values})
    return rows


def report(rows: Sequence[dict[str, Any]]) -> None:
    table = [
        [row["task"], row["items"], name, each["value"], "" if each["stderr"] is None else f"± {each['stderr']:.4f}"]
        for row in rows
        for name, each in row["metrics"].items()
    ]
    print_table(["task", "items", "", "value", "standard error"], table)

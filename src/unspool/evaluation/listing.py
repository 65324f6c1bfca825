"""The tasks that `unspool eval` knows, and where they come from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from unspool.evaluation.open_prompts import OPEN
from unspool.evaluation.packages import SOURCES, tasks_dir
from unspool.reporting import print_table

HERE = "built in"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("unspool eval tasks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object")
    options = parser.parse_args(argv)
    tasks = [
        {"name": name, "about": source.about, "package": source.wheel.requirement,
         "is_here": (tasks_dir() / f"{name}.jsonl").is_file()}
        for name, source in SOURCES.items()
    ]  # fmt: skip
    tasks += [{"name": name, "about": "essays, for loops alone", "package": None, "is_here": True} for name in OPEN]
    if options.json:
        print(json.dumps({"directory": str(tasks_dir()), "tasks": tasks}))
        return 0
    rows = [[task["name"], task["about"], task["package"] or HERE, "yes" if task["is_here"] else "no"]
            for task in tasks]  # fmt: skip
    print_table(["task", "", "from", "here"], rows)
    return 0

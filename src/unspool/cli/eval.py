"""unspool eval: how well a model solves tasks, and what sampling changes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from unspool.cli.parser import Parser, our_manners

DESCRIPTION = """\
Evaluate a model. Tasks are local files; known ones come from packages, fetched once.

  unspool eval TASK…            scores by EleutherAI's lm-eval (needs the extra `eval`)
  unspool eval sampling TASK…   greedy against sampling on the same items; answers that loop
  unspool eval drift FILE       how surprising a model's own text becomes, beside a reference text
  unspool eval tasks            the tasks that are known

`unspool eval sampling --help` and so on list the options."""
COMMANDS = {"sampling": "sampling", "drift": "drift", "tasks": "listing"}


def main(argv: Sequence[str]) -> int:
    parser = Parser("eval", "TASK… | sampling | drift | tasks  [options]", DESCRIPTION)
    parser.add_common()
    if not argv or argv[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    module = COMMANDS.get(argv[0])
    rest = argv if module is None else argv[1:]
    with our_manners():
        status: int = import_module(f"unspool.evaluation.{module or 'harness_run'}").main(rest)
    return status

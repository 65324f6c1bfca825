"""unspool doctor: what in a model's files makes it misbehave."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unspool.cli import flags
from unspool.cli.parser import Parser
from unspool.user_config import default_model

if TYPE_CHECKING:
    from unspool.doctor import Finding

DESCRIPTION = """\
Examine a model: end tokens, chat template, generation settings, vocabulary, weights. Each finding says what a user
would notice, how certain it is and how to fix it."""
EPILOG = """\
severity:
  error     answers are wrong or never end; exit status 1
  warning   they may be
  note      worth knowing; nothing to fix here

examples:
  unspool doctor                       the default model
  unspool doctor model.gguf --try      run it too: does it stop, does it repeat itself?
  unspool doctor model.gguf --json | jq -r '.findings[].title'"""
STYLE = {"error": "bold red", "warning": "yellow", "note": "dim"}


def main(argv: Sequence[str]) -> int:
    parser = Parser("doctor", "[MODEL] [options]", DESCRIPTION, EPILOG)
    parser.add_argument("model", metavar="MODEL", nargs="?", default=default_model(), help="as run's -m (%(default)s)")
    parser.add_argument("--random", metavar="SHAPE[:FORMAT]", help="as for run: a shape instead of a model")
    parser.add_argument("--try", dest="is_tried", action="store_true", help="run the model briefly too")
    parser.add_argument("--quick", action="store_true", help="do not decode the weights")
    parser.add_argument("--json", action="store_true", help="one object with all findings")
    parser.add_argument("--threads", dest="engine.threads", type=int, metavar="N", help="threads that --try uses")
    parser.add_argument("--device", dest="engine.device", metavar="DEVICE", help="where --try runs: auto, cpu or cuda")
    flags.add_override_flags(parser)
    parser.add_common()
    namespace = parser.parse_args(argv)

    from unspool.cli.loading import all_options, source_of
    from unspool.cli.terminal import ProgressBar
    from unspool.doctor import examine, open_subject
    from unspool.doctor.finding import by_severity

    options = all_options(namespace)
    subject = open_subject(source_of(namespace), options)
    bar = ProgressBar()
    progress: Callable[[int, int], None] = lambda done, total: bar("reading weights", done, total)  # noqa: E731
    try:
        findings = examine(subject, read_weights=not namespace.quick, progress=progress)
    finally:
        bar.close()
    if namespace.is_tried:
        from unspool.doctor.trial import run_trial
        from unspool.llm import LLM

        with LLM(subject.checkpoint, **options) as llm:
            findings = by_severity([*findings, *run_trial(llm)])
    if namespace.json:
        import json

        print(json.dumps(as_object(subject.checkpoint.name, findings), ensure_ascii=False))
    else:
        print_report(subject.checkpoint.name, findings)
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def as_object(model: str, findings: Sequence[Finding]) -> dict[str, Any]:
    counts = {name: sum(finding.severity == name for finding in findings) for name in STYLE}
    return {"model": model, "findings": [finding.as_dict() for finding in findings], "counts": counts}


def print_report(model: str, findings: Sequence[Finding]) -> None:
    import sys

    from unspool.cli.terminal import harmless, styled, width

    room = min(width(), 110)
    for finding in findings:
        head = f"{finding.severity} ({finding.certainty}): {harmless(finding.title)}"
        first, *more = textwrap.wrap(head, room, subsequent_indent="    ")
        print("\n".join([styled(first, STYLE[finding.severity], sys.stdout), *more]))
        for name, text in (("you notice", finding.effect), ("to fix it", finding.fix)):
            print(textwrap.fill(harmless(text), room, initial_indent=f"    {name:<11}", subsequent_indent=" " * 15))
    found = as_object(model, findings)["counts"]
    counts = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in found.items() if count)
    print(f"{model}: {counts or 'nothing found'}")

"""What is written from the registry of parameters: the typed fields of declared.py and the tables of docs/sampling.md.

python -m unspool.params.generate          print the fields
python -m unspool.params.generate ROOT     write both files of a checkout
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from unspool.params.registry import GROUPS, PARAMETERS, Parameter

HEAD = '''"""The typed fields of SamplingParams, ResolvedParams and SamplingOptions.

Written by `python -m unspool.params.generate` from the registry; change that instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from unspool.params.values import BeamParams, Constraint, RepetitionDetector, ThinkingMarks
from unspool.records import record

if TYPE_CHECKING:
    from unspool.params.rules import Stage, StopRule
'''
MARKS = "<!-- parameters: {} -->\n", "<!-- /parameters -->"


def declarations(parameters: Sequence[Parameter] = PARAMETERS) -> str:
    given, resolved, options = [], [], []
    for parameter in parameters:
        name, kind = parameter.name, parameter.kind
        annotation = kind.annotation + ("" if parameter.is_set else " | None")
        given.append(f"    {name}: {annotation} = {parameter.unset!r}\n")
        options.append(f"    {name}: {annotation}\n")
        resolved.append(f"    {name}: {kind.resolved}{' | None' if parameter.is_optional else ''}\n")
    # The classes that derive from them have the methods; made here too, they would be made twice at every start.
    frozen = "\n\n@record(frozen=True, kw_only=True, init=False, repr=False, eq=False)\n"
    return (
        f'{HEAD}{frozen}class SamplingFields:\n    """What a request may set."""\n\n{"".join(given)}'
        f'{frozen}class ResolvedFields:\n    """What is in force for a request."""\n\n{"".join(resolved)}'
        "\n\nclass SamplingOptions(TypedDict, total=False):\n"
        f'    """Sampling parameters as keyword arguments."""\n\n{"".join(options)}'
    )


def table(group: str, parameters: Sequence[Parameter] = PARAMETERS) -> str:
    """The parameters of a group as a table of Markdown."""
    rows = ["| parameter | default | allowed | what it does |", "|---|---|---|---|"]
    for parameter in parameters:
        if parameter.group == group:
            about = f"{parameter.help} {parameter.details}".rstrip()
            cells = (f"`{parameter.name}`", _default(parameter), parameter.kind.range, about)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _default(parameter: Parameter) -> str:
    if parameter.derived:
        return parameter.derived
    if parameter.default in (None, (), {}):
        return "none"
    default = parameter.default
    return f"{default:g}" if isinstance(default, float) else f"`{json.dumps(default)}`"


def with_tables(text: str) -> str:
    """A document with the tables between its marks written anew."""
    for group in GROUPS:
        begin, end = MARKS[0].format(group), MARKS[1]
        before, found, rest = text.partition(begin)
        if found:
            text = before + begin + table(group) + end + rest.partition(end)[2]
    return text


def main(arguments: list[str]) -> None:
    if not arguments:
        print(declarations(), end="")
        return
    root = Path(arguments[0])
    (root / "src/unspool/params/declared.py").write_text(declarations(), "utf-8")
    document = root / "docs/sampling.md"
    document.write_text(with_tables(document.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The table of families in docs/models.md: names from the registry, and what each was compared with.

    python scripts/support_table.py                     print it
    python scripts/support_table.py docs/models.md      put it between the marks

A family was compared with transformers where tests/fixtures/families has a model of it, with llama.cpp where
tests/fixtures/llama_cpp.json has a result (scripts/compare_llama_cpp.py writes it), and on real weights where
docs/notes/models.md tells of one.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from unspool.models.registry import config_from_json
from unspool.models.support import Support, supported

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
MARKS = ("<!-- families -->\n", "<!-- /families -->")
REAL = {"llama": "SmolLM2-135M", "qwen2": "Qwen2.5-Coder-0.5B", "gemma3": "Gemma-3-270M"}


def families_of_fixtures() -> dict[str, str]:
    """The family of each tiny model."""
    found = {}
    for path in sorted((FIXTURES / "families").glob("*/config.json")):
        found[path.parent.name] = config_from_json(path, json.loads(path.read_text("utf-8"))).architecture
    return found


def table() -> str:
    """In Markdown, with the notes below it."""
    of, results = families_of_fixtures(), json.loads((FIXTURES / "llama_cpp.json").read_text("utf-8"))
    notes = list(dict.fromkeys(each["note"] for each in results.values() if each["note"]))
    rows = ["| family | Hugging Face classes | GGUF | models | transformers | llama.cpp | weights |",
            "|---|---|---|---|---|---|---|"]  # fmt: skip
    rows += [_row(each, of, results, notes) for each in supported()]
    told = "The comparison does as llama.cpp does."
    below = "".join(f"\n{number}. {note}. {told}" for number, note in enumerate(notes, 1))
    return "\n" + "\n".join(rows) + "\n" + below + "\n\n"


def _row(support: Support, of: dict[str, str], results: dict[str, dict[str, object]], notes: list[str]) -> str:
    models = [name for name, family in of.items() if family == support.family]
    compared = [results[name] for name in dict.fromkeys([*models, support.family]) if name in results]
    marks = sorted({notes.index(str(each["note"])) + 1 for each in compared if each["note"]})
    worst = max((float(str(each["difference"])) for each in compared), default=None)
    cells = [
        f"`{support.family}`",
        ", ".join(f"`{name}`" for name in support.classes) or "–",
        ", ".join(f"`{name}`" for name in support.gguf),
        support.models,
        f"{len(models)}" if models else "–",
        "–" if worst is None else f"{worst:.0e}" + "".join(f" ({mark})" for mark in marks),
        REAL.get(support.family, "random"),
    ]
    return "| " + " | ".join(cells) + " |"


def main(arguments: list[str]) -> None:
    if not arguments:
        print(table())
        return
    path = Path(arguments[0])
    before, after = (re.escape(mark) for mark in MARKS)
    pattern = re.compile(f"({before}).*?({after})", re.DOTALL)
    path.write_text(pattern.sub(lambda found: found[1] + table() + found[2], path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

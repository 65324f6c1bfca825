"""The table of families in docs/models.md: names from the registry, and what each was compared with.

    python scripts/support_table.py                     print it
    python scripts/support_table.py docs/models.md      put it between the marks

A family was compared with transformers where tests/fixtures/families has a model of it, with llama.cpp where
tests/fixtures/llama_cpp.json has a result (scripts/compare_llama_cpp.py writes it), with files of llama.cpp's converter
where tests/fixtures/converter.json has one (scripts/compare_converter.py), and on real weights
where docs/notes/models.md describes one.
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
# Results, and what is added to their notes.
COMPARED = {
    "llama_cpp.json": "The comparison does as llama.cpp does.",
    "converter.json": "The comparison leaves it out, too.",
}
Result = dict[str, object]
REAL = {
    "llama": "SmolLM2-135M, TinyLlama-1.1B, stories15M",
    "qwen2": "Qwen2.5-Coder-0.5B, 1.5B",
    "gemma3": "Gemma-3-270M",
}


def families_of_fixtures() -> dict[str, str]:
    """The family of each tiny model."""
    found = {}
    for path in sorted((FIXTURES / "families").glob("*/config.json")):
        found[path.parent.name] = config_from_json(path, json.loads(path.read_text("utf-8"))).architecture
    return found


def table() -> str:
    """In Markdown, with the notes below it."""
    of, notes = families_of_fixtures(), [""]
    columns = [(_results(name), description) for name, description in COMPARED.items()]
    rows = ["| family | Hugging Face classes | GGUF | models | transformers | llama.cpp | converter | weights |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    rows += [_row(each, of, columns, notes) for each in supported()]
    below = "".join(f"\n{number}. {note}" for number, note in enumerate(notes) if note)
    return "\n" + "\n".join(rows) + "\n" + below + "\n\n"


def _results(name: str) -> dict[str, Result]:
    found: dict[str, Result] = json.loads((FIXTURES / name).read_text("utf-8"))
    return {model: result for model, result in found.items() if "difference" in result}


def _row(support: Support, of: dict[str, str], columns: list[tuple[dict[str, Result], str]], notes: list[str]) -> str:
    models = [name for name, family in of.items() if family == support.family]
    cells = [
        f"`{support.family}`",
        ", ".join(f"`{name}`" for name in support.classes) or "–",
        ", ".join(f"`{name}`" for name in support.gguf),
        support.models,
        f"{len(models)}" if models else "–",
        *(_compared(results, [*models, support.family], description, notes) for results, description in columns),
        REAL.get(support.family, "random"),
    ]
    return "| " + " | ".join(cells) + " |"


def _compared(results: dict[str, Result], models: list[str], description: str, notes: list[str]) -> str:
    """The largest difference of a family's models, and the numbers of notes on them, which are added to `notes`."""
    found = [results[name] for name in dict.fromkeys(models) if name in results]
    marks = []
    for note in dict.fromkeys(f"{each['note']}. {description}" for each in found if each["note"]):
        if note not in notes:
            notes.append(note)
        marks.append(f" ({notes.index(note)})")
    return f"{max(float(str(each['difference'])) for each in found):.0e}{''.join(marks)}" if found else "–"


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

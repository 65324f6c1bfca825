"""Tasks as local files: a JSON object a line, whose fields say what kind of task it is.

    query, choices, gold            which of the choices follows (`gold` is its index)
    sentence_good, sentence_bad     which of two sentences is likelier
    context, target                 whether the target follows, and how likely it is
    text                            how likely the text is
    prompt, and one of              what the model writes is scored:
        number · answer                 the number it ends on, or its text
        regex                           an expression that it must match
        json                            true: it must be JSON
        tests                           Python that must run behind it; `code_prefix` comes before it
      optional: question (the prompt for a chat), stop, max_tokens, id
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unspool.errors import RequestError

Kind = Literal["choice", "pair", "cloze", "text", "answer"]
_FIELDS: dict[Kind, tuple[str, ...]] = {
    "choice": ("query", "choices", "gold"),
    "pair": ("sentence_good", "sentence_bad"),
    "cloze": ("context", "target"),
    "answer": ("prompt",),
    "text": ("text",),
}
CHECKS = ("number", "answer", "regex", "json", "tests")  # what an answer may be checked by
MAX_TOKENS = 256  # of an answer, where the task does not say


@dataclass(frozen=True)
class Item:
    """One prompt of a task whose answers are scored. `doc` is its line."""

    id: str
    prompt: str
    question: str | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int = MAX_TOKENS
    doc: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    name: str
    kind: Kind
    path: Path

    def docs(self, limit: int | None = None) -> list[dict[str, Any]]:
        return [doc for _, doc in zip(range(limit if limit is not None else 1 << 60), _lines(self.path), strict=False)]


def open_task(path: Path, name: str | None = None) -> Task:
    """A task file; its first line says what kind it is."""
    first = next(_lines(path), None)
    if first is None:
        raise RequestError(f"{path} has no line", "task")
    kind = next((kind for kind, names in _FIELDS.items() if all(each in first for each in names)), None)
    if kind is None:
        known = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in _FIELDS.items())
        raise RequestError(f"the first line of {path} has {', '.join(first)}; needed are the fields of one of {known}",
                           "task")  # fmt: skip
    return Task(name or path.stem, kind, path)


def read_items(task: Task, limit: int | None = None, *, is_checked: bool = True) -> list[Item]:
    """Of a task that asks for answers. With `is_checked` each line has to say what a right one is."""
    if task.kind != "answer":
        wanted = "a sampled answer is scored where lines have prompt and one of " + ", ".join(CHECKS)
        raise RequestError(f"{task.name} asks for no answer ({task.kind}); {wanted}", "task")
    return [_item(task.path, number, doc, is_checked) for number, doc in enumerate(task.docs(limit), 1)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                doc = json.loads(line)
            except ValueError as error:
                raise RequestError(f"{path}:{number} is not JSON: {error}", "task") from None
            if not isinstance(doc, dict):
                raise RequestError(f"{path}:{number} is not an object", "task")
            yield doc


def _item(path: Path, number: int, doc: Mapping[str, Any], is_checked: bool) -> Item:
    where = f"{path}, item {number}"
    if not isinstance(doc.get("prompt"), str):
        raise RequestError(f"{where}: prompt is missing or is no text", "task")
    if is_checked and not any(name in doc for name in CHECKS):
        raise RequestError(f"{where}: one of {', '.join(CHECKS)} is needed to score an answer", "task")
    stop, most = doc.get("stop", ()), doc.get("max_tokens", MAX_TOKENS)
    if isinstance(stop, str) or not isinstance(stop, Sequence) or not all(isinstance(one, str) for one in stop):
        raise RequestError(f"{where}: stop is {stop!r:.60}; a list of texts is needed", "task")
    if not isinstance(most, int) or most < 1:
        raise RequestError(f"{where}: max_tokens is {most!r:.60}; 1 or more is needed", "task")
    return Item(str(doc.get("id", number)), doc["prompt"], doc.get("question"), tuple(stop), most, doc)

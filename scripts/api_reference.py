"""docs/api.md, made from the signatures and docstrings of everything that `unspool.__all__` names.

python scripts/api_reference.py           print it
python scripts/api_reference.py FILE      write it
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import unspool
from unspool.params.registry import PARAMETERS

HEAD = """\
# API reference

Everything that `from unspool import …` gives, made from the docstrings by
`python scripts/api_reference.py docs/api.md`. The examples are run by the tests; `llm` is `LLM()`, the default model.
[From Python](python.md) is the guide.
"""
GROUPS = {
    "Models": ("LLM", "AsyncLLM", "Stream", "AsyncStream"),
    "Parameters": (
        "SamplingParams", "SamplingOptions", "Constraint", "BeamParams", "RepetitionDetector", "PRESETS", "Preset",
        "EngineConfig", "EngineOptions", "ModelConfig",
    ),
    "Results": ("Result", "Completion", "ToolCall", "Receipt", "Usage", "Timings"),
    "Events": ("Event", "Text", "Token", "Finished", "Failed"),
    "Functions of your own": (
        "LogitStage", "StageState", "StopRule", "StopState", "Drafter", "DraftContext", "Draft",
    ),
}  # fmt: skip
# What is no class, or says all in its name.
OTHERS = {
    "Event": "`Text`, `Finished` or `Failed`: what a stream yields.",
    "PRESETS": "Orders of the sampling stages by name (`unspool`, `vllm`, …), each a `Preset`.",
    "SamplingOptions": "The fields of `SamplingParams` as keyword arguments (a `TypedDict`).",
    "EngineOptions": "The fields of `EngineConfig` as keyword arguments (a `TypedDict`).",
    "StopRule": "A function of a `StopState` that says whether the answer ends.",
    "LogitStage": "A function of a row of logits and a `StageState` that returns the row.",
}
WIDTH = 110


def reference() -> str:
    named = [name for names in GROUPS.values() for name in names]
    errors = [name for name in unspool.__all__ if is_error(getattr(unspool, name))]
    left = set(unspool.__all__) - set(named) - set(errors)
    if left:
        raise SystemExit(f"GROUPS has no place for {', '.join(sorted(left))}")
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [entry(name) for name in names]
    parts.append("## Errors\n")
    rows = [f"| `{name}` | `{base(name)}` | {flat(doc_of(getattr(unspool, name)))} |" for name in errors]
    parts.append("\n".join(["| error | is a | |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def base(name: str) -> str:
    return str(getattr(unspool, name).__mro__[1].__name__)


def entry(name: str) -> str:
    value = getattr(unspool, name)
    if name in OTHERS:
        return f"### {name}\n\n{OTHERS[name]}\n"
    parts = [f"### {name}\n"]
    if name in ("LLM", "AsyncLLM"):
        parts.append(code(signature(value.__init__, name)))
    parts.append(prose(doc_of(value)))
    table = parameters() if name == "SamplingParams" else fields(value)
    if table:
        parts.append(table)
    parts += [member(value, own) for own in methods(value)]
    shown = "" if name == "AsyncLLM" else properties(value)
    if name == "AsyncLLM":
        parts.append("`decode`, `encode`, `render`, `receipt`, `utilization` and the properties are those of `LLM`.\n")
    if shown:
        parts.append(shown)
    return "\n".join(parts)


def methods(cls: type) -> Iterator[str]:
    """Public methods, of its own and inherited from our classes, as they are defined. Those of AsyncLLM that LLM has
    too, word for word, are not repeated."""
    seen = set()
    for owner in [cls] if cls is unspool.AsyncLLM else reversed(cls.__mro__):
        if not owner.__module__.startswith("unspool"):
            continue
        for name, value in vars(owner).items():
            if name.startswith("_") or name in seen or not is_function(value):
                continue
            seen.add(name)
            yield name


def is_function(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)


def member(cls: type, name: str) -> str:
    value = getattr(cls, name)
    return f"#### {cls.__name__}.{name}\n\n{code(signature(value, name))}\n{prose(doc_of(value))}"


def signature(function: Any, name: str) -> str:
    """As it is written, without `self`, on one line or with a line for each argument."""
    parsed = inspect.signature(function)
    shown, star = [], False
    for one in parsed.parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and not star:
            shown.append("*")
        star = star or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        mark = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = "" if one.default is one.empty else f" = {shown_value(one.default)}"
        note = "" if one.annotation is one.empty else f": {one.annotation}"
        shown.append(f"{mark}{one.name}{note}{default}")
    keyword = "async def " if inspect.iscoroutinefunction(function) else ""
    returns = "" if parsed.return_annotation in (parsed.empty, "None") else f" -> {parsed.return_annotation}"
    whole = f"{keyword}{name}({', '.join(shown)}){returns}"
    if len(whole) <= WIDTH:
        return whole
    return f"{keyword}{name}(\n" + "".join(f"    {one},\n" for one in shown) + f"){returns}"


def shown_value(value: Any) -> str:
    return value.__name__.strip("<>") if inspect.isfunction(value) else repr(value)


def code(text: str) -> str:
    return f"```\n{text}\n```\n"


def doc_of(value: Any) -> str:
    """Its docstring, not one that a dataclass or a named tuple made."""
    text = value.__doc__ or ""
    return (
        "" if text.startswith((f"{getattr(value, '__name__', '')}(", "Create and return")) else inspect.cleandoc(text)
    )


def prose(text: str) -> str:
    """A docstring as Markdown: its examples are blocks of code."""
    parts = []
    for block in re.split(r"\n\s*\n", text):
        is_example = block.lstrip().startswith(">>>")
        parts.append(f"```python\n{block}\n```" if is_example else block)
    return "\n\n".join(parts) + "\n" if text else ""


def fields(cls: Any) -> str:
    """A record's fields, with the comments behind them."""
    if hasattr(cls, "_fields"):
        kinds, defaults = cls.__annotations__, cls._field_defaults
        return table([(name, kinds[name].__forward_arg__, defaults.get(name, REQUIRED)) for name in cls._fields], cls)
    if not dataclasses.is_dataclass(cls):
        return ""
    rows = []
    for one in dataclasses.fields(cls):
        default = one.default if one.default is not dataclasses.MISSING else REQUIRED
        if one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        rows.append((one.name, one.type, default))
    return table(rows, cls)


REQUIRED = object()


def table(rows: list[tuple[str, Any, Any]], cls: type) -> str:
    about = comments(cls)
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for name, kind, default in rows:
        shown = "" if default is REQUIRED else f"`{shown_value(default)}`"
        lines.append(f"| `{name}` | `{escaped(str(kind))}` | {shown} | {escaped(about.get(name, ''))} |")
    return "\n".join(lines) + "\n"


def comments(cls: type) -> dict[str, str]:
    """What stands behind each field in the source."""
    found = {}
    for line in inspect.getsource(cls).splitlines():
        named = re.match(r"\s{4}(\w+): .*?\s{2}# (.*)$", line)
        if named:
            found[named[1]] = named[2]
    return found


def parameters() -> str:
    """SamplingParams' fields, from their registry."""
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for one in PARAMETERS:
        default = one.derived or f"`{one.default!r}`"
        lines.append(f"| `{one.name}` | `{escaped(one.kind.annotation)}` | {default} | {escaped(one.help)} |")
    return "\n".join(lines) + "\n"


def properties(cls: type) -> str:
    """What can be read besides the fields."""
    lines = []
    for owner in reversed(cls.__mro__):
        for name, value in vars(owner).items():
            getter = getattr(value, "fget", None) or getattr(value, "func", None)
            if name.startswith("_") or getter is None or not owner.__module__.startswith("unspool"):
                continue
            kind = inspect.signature(getter).return_annotation
            about = escaped(flat(inspect.cleandoc(getter.__doc__ or "")))
            lines.append(f"| `{name}` | `{escaped(str(kind))}` | {about} |")
    return "\n".join(["| property | type | |", "|---|---|---|", *lines]) + "\n" if lines else ""


def flat(text: str) -> str:
    """A docstring's prose on one line."""
    return " ".join(text.partition("\n>>>")[0].split())


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> None:
    text = reference()
    if arguments:
        Path(arguments[0]).write_text(text, "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main(sys.argv[1:])

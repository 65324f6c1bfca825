"""What an answer is worth: 0 to 1. A scorer also says which answer a text gives, so that answers can be compared."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unspool.errors import BackendError, RequestError
from unspool.evaluation.sandbox import run_python
from unspool.evaluation.tasks import Item
from unspool.openai_client import Endpoint, ask, model_of

_SAID = re.compile(r"answer\s+is:?\s*\**\$?(-?[\d,]*\.?\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_FENCE = re.compile(r"```[\w+-]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Scorer(Protocol):
    def score(self, item: Item, text: str) -> float | None:
        """From 0 to 1; None: there is no right answer."""
        ...

    def answer(self, item: Item, text: str) -> str:
        """What of the text is the answer; two texts with the same one say the same."""
        ...


class TaskScorer:
    """By what a task's line is checked by: number, answer, regex, json or tests."""

    def score(self, item: Item, text: str) -> float | None:
        doc = item.doc
        if "number" in doc:
            return float(_same_number(number_in(text), str(doc["number"])))
        if "answer" in doc:
            return float(_plain(text) == _plain(str(doc["answer"])))
        if "regex" in doc:
            return float(re.search(doc["regex"], text) is not None)
        if "json" in doc:
            return float(json_value(text) is not None)
        return float(run_python(program(doc, text)).passed) if "tests" in doc else None

    def answer(self, item: Item, text: str) -> str:
        if "number" in item.doc:
            return number_in(text) or ""
        return code_in(text).rstrip() if "tests" in item.doc else _plain(text)


# Numbers, JSON and code in answers ------------------------------------------------------------------------------------
def number_in(text: str) -> str | None:
    """The number behind the first "the answer is", else the last one of the text; without thousands' commas."""
    said = _SAID.search(text)
    found = [said[1]] if said is not None else _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def _same_number(found: str | None, wanted: str) -> bool:
    if found is None:
        return False
    try:
        return abs(float(found) - float(wanted.replace(",", ""))) < 1e-6
    except ValueError:
        return False


def _plain(text: str) -> str:
    return " ".join(text.split())


def json_value(text: str) -> Any:
    """The value of a text that is JSON as a whole, or whose code block is; None: it is not. `null` counts as none."""
    fenced = _FENCE.search(text)
    for source in (text, fenced[1] if fenced else None):
        try:
            if source is not None:
                return json.loads(source)
        except ValueError:
            continue
    return None


def code_in(text: str) -> str:
    """The first code block, or the text if it has none."""
    fenced = _FENCE.search(text)
    return text if fenced is None else fenced[1]


def program(doc: Mapping[str, Any], text: str) -> str:
    """An answer as a program with its tests. One that only goes on with the prompt's function is put behind it."""
    prefix, code = doc.get("code_prefix", ""), code_in(text)
    if prefix and re.search(rf"^def\s+{re.escape(doc.get('entry_point', ''))}\b", code, re.MULTILINE):
        imports = [line for line in prefix.splitlines() if line.startswith(("import ", "from "))]
        prefix = "\n".join([*imports, ""])
    return f"{prefix}{code}\n{doc['tests']}\n"


# Scorers of one's own -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RegexScorer:
    pattern: re.Pattern[str]

    def score(self, item: Item, text: str) -> float:
        return float(self.pattern.search(text) is not None)

    def answer(self, item: Item, text: str) -> str:
        return _plain(text)


class JsonScorer:
    """1 for JSON, alone or in a code block."""

    def score(self, item: Item, text: str) -> float:
        return float(json_value(text) is not None)

    def answer(self, item: Item, text: str) -> str:
        return json.dumps(json_value(text), sort_keys=True)


@dataclass(frozen=True)
class FunctionScorer:
    """A function of the user's: called with the prompt and the answer, it gives a number from 0 to 1 or a bool."""

    function: Callable[[str, str], Any]
    name: str

    def score(self, item: Item, text: str) -> float:
        try:
            value = float(self.function(item.question or item.prompt, text))
        except Exception as error:
            raise BackendError(f"{self.name} failed: {type(error).__name__}: {error}") from error
        if not 0 <= value <= 1:
            raise RequestError(f"{self.name} gave {value:g}; a score is from 0 to 1", "scorer")
        return value

    def answer(self, item: Item, text: str) -> str:
        return _plain(text)


JUDGE = (
    "Judge how well the answer does what the request asks for. Reply with one whole number from 0 (useless) to 10 "
    "(perfect) and nothing else.\n\nRequest:\n{prompt}\n\nAnswer:\n{answer}\n\nYour number:"
)


class JudgeScorer:
    """Another model's opinion, from any OpenAI-compatible server, at temperature 0."""

    def __init__(self, endpoint: Endpoint, model: str | None = None) -> None:
        self._endpoint = endpoint
        self._model = model or asyncio.run(model_of(endpoint))

    def score(self, item: Item, text: str) -> float:
        content = JUDGE.format(prompt=item.question or item.prompt, answer=text)
        body = {"model": self._model, "messages": [{"role": "user", "content": content}], "temperature": 0,
                "max_tokens": 8}  # fmt: skip
        reply = asyncio.run(ask(self._endpoint, "chat/completions", body))
        if reply.error is not None:
            raise BackendError(f"the judge at {self._endpoint.url} gave no opinion: {reply.error}")
        found = re.search(r"\d+(?:\.\d+)?", reply.text)
        if found is None:
            raise BackendError(f"the judge at {self._endpoint.url} gave no number: {reply.text[:100]!r}")
        return min(1.0, float(found[0]) / 10)

    def answer(self, item: Item, text: str) -> str:
        return _plain(text)


def scorer_of(given: str, *, key: str | None = None) -> Scorer:
    """regex:PATTERN, json, python:FILE:FUNCTION, or judge:URL."""
    kind, _, value = given.partition(":")
    if kind == "regex" and value:
        try:
            return RegexScorer(re.compile(value))
        except re.error as error:
            raise RequestError(f"{value!r} is no regular expression: {error}", "scorer") from None
    if given == "json":
        return JsonScorer()
    if kind == "python" and value.count(":"):
        return FunctionScorer(_function(*value.rsplit(":", 1)), value)
    if kind == "judge" and value:
        return JudgeScorer(Endpoint(value, key))
    raise RequestError(
        f"scorer is {given!r}; allowed: json, regex:PATTERN, python:FILE:FUNCTION, judge:URL", "scorer"
    )


def _function(file: str, name: str) -> Callable[[str, str], Any]:
    from importlib.util import module_from_spec, spec_from_file_location

    path = Path(file).expanduser()
    spec = spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise RequestError(f"{file} is no Python file", "scorer")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RequestError(f"{file} cannot be imported: {type(error).__name__}: {error}", "scorer") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RequestError(f"{file} has no function {name}", "scorer")
    return function

"""Whitespace of constrained JSON: what models write is accepted, consistently nested, and nothing else."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fixtures.small_vocabulary import SmallVocabulary
from unspool.bench.walk import Dice
from unspool.sampling.constraint import Matcher, compile_constraint

VOCABULARY = SmallVocabulary()
DICE = Dice(VOCABULARY)  # type: ignore[arg-type]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "integer"}},
        "inner": {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
    },
    "required": ["name"],
}
INNER = {"name": "cat", "inner": {"a": []}}
VALUE = {"name": "dog", "tags": [1, 2], "inner": {"a": [INNER, {"name": "x", "tags": []}]}}


def made(schema: Any, **options: Any) -> Matcher:
    value = {**schema, "x-unspool": options} if options else schema
    return compile_constraint(SimpleNamespace(kind="json_schema", value=value), VOCABULARY)


def accepts(root: Matcher, text: str) -> bool:
    return DICE.spells(root.fork(), text.encode())


@pytest.mark.parametrize("indent", [None, 2, 4])
def test_what_models_write_is_accepted(indent: int | None) -> None:
    assert accepts(made(SCHEMA), json.dumps(VALUE, indent=indent))
    assert accepts(made(True), json.dumps(VALUE, indent=indent)), "any JSON"
    assert accepts(made({"type": "array"}), json.dumps([VALUE, [[]], [], {}], indent=indent))


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"dog","tags":[1,2]}',
        '{ "name": "dog", "tags": [ 1, 2 ] }',
        '{"name": "dog", "tags": [1,2]}',
        '{\n  "name": "dog",\n  "tags": [1, 2]\n}',
        '{\n    "name": "dog",\n    "inner": {"a": []}\n}',
        '{\n  "name": "dog",\n  "inner": { "a": [{"name": "x"}] }\n}',
    ],
)
def test_lists_and_objects_may_stand_in_one_line(text: str) -> None:
    assert accepts(made(SCHEMA), text)


@pytest.mark.parametrize(
    "text",
    [
        '{"name" : "dog"}',
        '{"name":  "dog"}',
        '{"name":\n"dog"}',
        ' {"name": "dog"}',
        '{"name": "dog"} ',
        '{  "name": "dog"}',
        '{ "name": "dog"}',
        '{"name": "dog" }',
        '{"name": "dog" , "tags": []}',
        '{"name": "dog", "tags": [ ]}',
        '{"name": "dog", "tags": [1,  2]}',
        '{\n"name": "dog"\n}',
        '{\n   "name": "dog"\n}',
        '{\n\n  "name": "dog"\n}',
        '{\n  "name": "dog"}',
        '{\n  "name": "dog"\n  }',
        '{\n  "name": "dog", "tags": []\n}',
        '{\n  "name": "dog",\n    "tags": []\n}',
        '{\n  "name": "dog",\n  "tags": [\n  1\n  ]\n}',
        '{\n  "name": "dog",\n  "tags": [\n      1\n  ]\n}',
        '{\n    "name": "dog",\n    "tags": [\n      1\n    ]\n}',
        '{"name": "dog",\n "tags": []}',
        '{"name": "dog", "tags": [\n  1\n]}',
    ],
)
def test_other_whitespace_is_not(text: str) -> None:
    assert isinstance(json.loads(text), dict)
    assert not accepts(made(SCHEMA), text)


def test_deep_documents_end_in_one_line() -> None:
    value: Any = 1
    for _ in range(20):
        value = [value]
    assert accepts(made({"type": "array"}), json.dumps(value))
    deep = json.dumps(value, indent=2)
    assert not accepts(made({"type": "array"}), deep)
    lines = deep.splitlines()
    inside = "".join(line.strip() for line in lines[12:-12])
    assert accepts(made({"type": "array"}), "\n".join([*lines[:12], " " * 24 + inside, *lines[-12:]]))


def test_compact_has_none_and_flexible_has_some_anywhere() -> None:
    compact, flexible = made(SCHEMA, whitespace="compact"), made(SCHEMA, whitespace="flexible")
    text = '{"name":"dog","tags":[1,2],"inner":{"a":[]}}'
    assert accepts(compact, text)
    assert accepts(flexible, text)
    for spaced in ('{"name": "dog"}', '{ "name":"dog"}', '{"name":"dog","tags":[1, 2]}', '{\n  "name":"dog"\n}'):
        assert not accepts(compact, spaced), spaced
        assert accepts(flexible, spaced), spaced
    for spaced in ('{\t"name" :\n"dog" ,"tags":[ ] }', '{"name":"dog","tags":[\r\n]}'):
        assert accepts(flexible, spaced), spaced
    assert accepts(flexible, '{"name":' + " " * 64 + '"dog"}')
    assert not accepts(flexible, '{"name":' + " " * 65 + '"dog"}')


def is_laid_out(text: str) -> bool:
    """Whether this is one document as `model` has it, said in another way than by a grammar."""
    value = json.loads(text, object_pairs_hook=tuple)  # objects are tuples of pairs, names that come twice included
    return any(_end(text, 0, 0, width, value) == len(text) for width in (2, 4))


def _end(text: str, at: int, level: int, width: int, value: Any) -> int:
    """Where the value that begins here ends; -1 where it is laid out wrongly."""
    if not isinstance(value, list | tuple) or not value:
        written = "{}" if value == () else "[]" if value == [] else text[at : at + _scalar_length(text, at)]
        return at + len(written) if text.startswith(written, at) else -1
    at += 1
    line = "\n" + " " * width * (level + 1)
    if text.startswith("\n", at):
        between, closes, inner = [f",{line}"], f"\n{' ' * width * level}", level + 1
        opens = line
    else:
        opens = closes = " " if text.startswith(" ", at) else ""
        between, inner = [", ", ","], 1000
    if not text.startswith(opens, at):
        return -1
    at += len(opens)
    for number, item in enumerate(value):
        if number:
            comma = next((comma for comma in between if text.startswith(comma, at)), None)
            if comma is None:
                return -1
            at += len(comma)
        if isinstance(value, tuple):
            at += _scalar_length(text, at)
            colon = ": " if text.startswith(": ", at) else ":"
            if not text.startswith(colon, at):
                return -1
            at += len(colon)
            item = item[1]
        if inner == 1000 and text.startswith(("{\n", "[\n"), at):
            return -1
        at = _end(text, at, inner, width, item)
        if at < 0:
            return -1
    end = closes + ("}" if isinstance(value, tuple) else "]")
    return at + len(end) if text.startswith(end, at) else -1


def _scalar_length(text: str, at: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(text, at)[1] - at
    except ValueError:
        return len(text) + 1  # beyond the end, where nothing can follow


def test_the_judge_of_layouts() -> None:
    for indent in (None, 2, 4):
        assert is_laid_out(json.dumps(VALUE, indent=indent))
    for text in ('{\n  "a": 1,\n    "b": 2\n}', '{\n  "a": {\n  "b": 2\n  }\n}', "[1,  2]", '[{\n  "a": 1\n}]', "[1 ]"):
        assert not is_laid_out(text)


@pytest.mark.parametrize(
    "schema",
    [
        SCHEMA,
        {"type": "array", "items": {"type": "object", "minProperties": 1, "maxProperties": 3}, "minItems": 2},
        {"anyOf": [{"type": "object", "properties": {"a": {"type": "array"}}, "minProperties": 1}, SCHEMA]},
        {"type": "array", "items": {"enum": [1, [2, {"a": [3]}], {"b": {"c": 4, "d": []}}]}, "minItems": 1},
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
    ],
    ids=["recursive", "counted", "options", "constants", "unique"],
)
def test_every_walk_is_laid_out(schema: Any) -> None:
    root, finished = made(schema), 0
    for seed in range(15):
        rng = np.random.default_rng(seed)
        walk = DICE.walk(root.fork(), rng, limit=150, haste=float(rng.choice([0.5, 2, 8])))
        if walk.finished and json.loads(walk.text) not in ({}, []):
            finished += 1
            assert is_laid_out(walk.text.decode()), walk.text
    assert finished > 3


@pytest.mark.parametrize("whitespace", ["model", "compact", "flexible"])
def test_no_walk_runs_on_in_whitespace(whitespace: str) -> None:
    root = made(SCHEMA, whitespace=whitespace)
    blank = [token for token in range(VOCABULARY.vocab_size) if VOCABULARY.token_bytes(token).isspace()]
    matcher, rng = root.fork(), np.random.default_rng(1)
    for byte in b'{"name":' if whitespace == "compact" else b"{":
        if matcher.check(byte):  # the small vocabulary's first tokens are the bytes
            matcher.accept(byte)
    count = 0
    while allowed := [token for token in blank if matcher.check(token)]:
        matcher.accept(int(rng.choice(allowed)))
        count += 1
    assert count <= {"model": 5, "compact": 0, "flexible": 64}[whitespace]

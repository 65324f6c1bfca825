"""Grammars of calls: what a family writes is taken and what its parser reads fits the schema; all else is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.fixtures.small_vocabulary import SPECIAL, SmallVocabulary
from unspool.bench.walk import Dice
from unspool.chat import call_formats
from unspool.chat.answers import AnswerSyntax, Message
from unspool.chat.call_formats import CallFormat
from unspool.chat.call_grammar import constraint_for
from unspool.chat.reasoning import HARMONY as HARMONY_REASONING
from unspool.chat.tools import Toolbox, read_toolbox
from unspool.errors import RequestError
from unspool.params import Constraint
from unspool.sampling.constraint import Matcher, compile_constraint
from unspool.text.marks import MarkSplitter


class Vocabulary(SmallVocabulary):
    """With control tokens that a text can name. (One of its ends is called as a mark within gpt-oss' answers.)"""

    @property
    def control_marks(self) -> MarkSplitter:
        first = self.vocab_size - len(SPECIAL)
        ids = {text: first + index for index, text in enumerate(SPECIAL)}
        return MarkSplitter({text: index for text, index in ids.items() if index not in self.eos_ids})


VOCABULARY = Vocabulary()
DICE = Dice(VOCABULARY)  # type: ignore[arg-type]
FORMATS = {
    value.name: value
    for value in vars(call_formats).values()
    if isinstance(value, CallFormat) and value is not call_formats.GENERIC
}
PROPERTIES: dict[str, Any] = {
    "city": {"type": "string", "description": "Where."},
    "days": {"type": "integer", "minimum": 1, "maximum": 9},
    "unit": {"type": "string", "enum": ["C", "F"]},
    "exact": {"type": "boolean"},
    "at": {"type": "array", "items": {"type": "number"}},
    "near": {"$ref": "#/$defs/Place"},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["city", "days", "unit"],
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
    "additionalProperties": False,
}
ARGUMENTS = {
    "city": 'Os"lo\n{5}', "days": 3, "unit": "C", "exact": True, "at": [1, -2.5], "near": {"name": "it's <b>"},
}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
GO = {"type": "function", "function": {"name": "go"}}


def tagged(call: Any, arguments: dict[str, Any], name: str) -> str:
    written = f"{call.begins}{name}{call.name_ends}{call.line}"
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        between = f"{call.line}{call.value_begins}" if call.value_begins else ""
        written += (
            f"{call.parameter}{key}{call.key_ends}{between}{call.pad}{text}{call.pad}{call.value_ends}{call.line}"
        )
    return written + str(call.ends)


def bare(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{bare(value[key])}" for key in sorted(value)) + "}"
    return f"[{','.join(map(bare, value))}]" if isinstance(value, list) else json.dumps(value)


def one(format: CallFormat, arguments: dict[str, Any], name: str) -> str:
    """One call as a model of the family writes it, without the marks of a run."""
    call, written = format.call, json.dumps(arguments)
    if isinstance(call, call_formats.ObjectCall):
        return f'{{{call.extra}"{call.name_key}": "{name}", "{call.arguments_key}": {written}}}'
    if isinstance(call, call_formats.NamedCall):
        count = ":0" if call.counts else f"{call.id_mark}abcdefghi" if call.id_mark else ""
        return f"{call.begins}{call.prefix}{name}{count}{call.separator}{written}{call.ends}"
    if isinstance(call, call_formats.BareCall):
        return f"call:{name}{bare(arguments)}"
    if isinstance(call, call_formats.PythonCall):
        return f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})"
    return tagged(call, arguments, name)


def run(format: CallFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """The calls with all their marks."""
    written = [one(format, arguments, name) for name, arguments in calls]
    if format is call_formats.HARMONY:
        return f"{format.opens}{written[0]}"
    if format.is_bare:
        return (format.more or "").join(written)
    runs = [(format.more or "").join(written)] if format.more is not None else written
    return format.again.join(f"{format.opens}{format.lead}{each}{format.tail}{format.closes}" for each in runs)


def matcher(format: CallFormat, toolbox: Toolbox, answer: Constraint | None = None) -> Matcher:
    constraint = constraint_for(toolbox, format, answer, VOCABULARY)  # type: ignore[arg-type]
    assert constraint is not None
    found = compile_constraint(constraint, VOCABULARY)
    assert isinstance(found, Matcher)
    return found


def read(format: CallFormat, text: str) -> list[tuple[str, Any]]:
    reasoning = HARMONY_REASONING if format is call_formats.HARMONY else None
    message = Message(None, AnswerSyntax(format, frozenset({"weather", "go"}), reasoning=reasoning,
                                         schemas={"weather": SCHEMA}))  # fmt: skip
    message.push(text)
    message.flush()
    return [(call.name, call.values) for call in message.calls]


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_is_what_the_family_writes(name: str) -> None:
    format = FORMATS[name]
    grammar = matcher(format, read_toolbox([WEATHER, GO], "required", parallel=False))
    for call in (("weather", ARGUMENTS), ("go", {})):
        text = run(format, call)
        assert DICE.spells(grammar.fork(), text.encode()), text
        assert read(format, text) == [call]
    for wrong in (
        {**ARGUMENTS, "days": 10},
        {**ARGUMENTS, "unit": "K"},
        {**ARGUMENTS, "days": "many"},
        {**ARGUMENTS, "at": ["x"]},
        {**ARGUMENTS, "near": 3},
        {key: value for key, value in ARGUMENTS.items() if key != "days"},
        {**ARGUMENTS, "zone": "x"},
    ):
        assert not DICE.spells(grammar.fork(), run(format, ("weather", wrong)).encode()), wrong
    for text in ("Hello", run(format, ("fly", {})), ""):
        assert not DICE.spells(grammar.fork(), text.encode())


@pytest.mark.parametrize("name", FORMATS)
def test_some_arguments_may_be_left_out(name: str) -> None:
    format = FORMATS[name]
    grammar = matcher(format, read_toolbox([WEATHER], "required"))
    for left_out in (("exact",), ("at", "near"), ("exact", "at", "near")):
        arguments = {key: value for key, value in ARGUMENTS.items() if key not in left_out}
        text = run(format, ("weather", arguments))
        assert DICE.spells(grammar.fork(), text.encode()), text
        [(_, found)] = read(format, text)
        assert found == arguments
        jsonschema.validate(found, SCHEMA)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
def test_two_calls_where_two_are_wanted(name: str) -> None:
    format = FORMATS[name]
    calls = (("weather", ARGUMENTS), ("go", {}))
    text = run(format, *calls)
    assert DICE.spells(matcher(format, read_toolbox([WEATHER, GO], "required")), text.encode()), text
    assert read(format, text) == list(calls)
    assert not DICE.spells(matcher(format, read_toolbox([WEATHER, GO], "required", parallel=False)), text.encode())


@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_tool_leaves_text_free(name: str) -> None:
    format = FORMATS[name]
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    grammar = matcher(format, read_toolbox([strict]))
    call, wrong = run(format, ("weather", ARGUMENTS)), run(format, ("weather", {**ARGUMENTS, "days": 10}))
    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert DICE.spells(grammar.fork(), f"{head}It rains.".encode())
    assert DICE.spells(grammar.fork(), call.encode())
    assert not DICE.spells(grammar.fork(), wrong.encode())
    if not format.is_bare and name != "harmony":
        assert DICE.spells(grammar.fork(), f"Let me see.\n{call}".encode())
        assert not DICE.spells(grammar.fork(), f"Let me see.\n{wrong}".encode())


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_for_the_answer_goes_with_calls(name: str) -> None:
    format = FORMATS[name]
    answer = Constraint("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                                        "additionalProperties": False})  # fmt: skip
    grammar = matcher(format, read_toolbox([WEATHER]), answer)
    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert DICE.spells(grammar.fork(), f'{head}{{"a": 1}}'.encode())
    assert DICE.spells(grammar.fork(), run(format, ("weather", ARGUMENTS)).encode())
    assert not DICE.spells(grammar.fork(), f'{head}{{"b": 1}}'.encode())


class HarmonyVocabulary(SmallVocabulary):
    """With gpt-oss' control tokens."""

    def __init__(self) -> None:
        super().__init__()
        marks = [mark.encode() for mark in HARMONY_REASONING.marks if mark.encode() not in self._tokens]
        self._tokens += marks
        self.vocab_size = len(self._tokens)
        self.control_marks = MarkSplitter({mark: self._tokens.index(mark.encode()) for mark in HARMONY_REASONING.marks})
        self.special_ids |= frozenset(map(self._tokens.index, marks))
        self.eos_ids = frozenset(map(self._tokens.index, (b"<|call|>", b"<|return|>")))
        self.fingerprint = "harmony"


def test_harmony_may_think_before_it_calls() -> None:
    vocabulary = HarmonyVocabulary()
    dice = Dice(vocabulary)  # type: ignore[arg-type]
    constraint = constraint_for(read_toolbox([GO], "required"), call_formats.HARMONY, None, vocabulary)  # type: ignore[arg-type]
    root = compile_constraint(constraint, vocabulary)

    def spells(text: str) -> bool:
        matcher = root.fork()
        for part in vocabulary.control_marks.split(text):
            if isinstance(part, int):
                if not matcher.check(part):
                    return False
                matcher.accept(part)
            elif dice.text(dice.cut(matcher, part.encode())) != part.encode():
                return False
        return bool(matcher.is_accepting)

    thought = "<|channel|>analysis<|message|>Hm. <b>{<|end|><|start|>assistant"
    call = run(call_formats.HARMONY, ("go", {}))
    assert spells(thought + call)
    assert spells(call)
    assert not spells(f"{thought}<|channel|>final<|message|>No.")
    assert not spells("No.")
    assert read(call_formats.HARMONY, thought + call) == [("go", {})]


@pytest.mark.parametrize(
    ("name", "schema", "keyword"),
    [
        ("qwen-xml", {"type": "string", "pattern": "^a"}, "pattern of x"),
        ("glm", {"type": "string", "format": "date"}, "format of x"),
        ("gemma", {"type": "array", "items": {"type": "integer"}, "minItems": 1}, "minItems of x"),
        ("gemma", {"type": "object", "properties": {"y": {"type": "string", "maxLength": 3}}}, "maxLength of y"),
    ],
)
def test_what_a_notation_cannot_be_held_to_is_refused(name: str, schema: Any, keyword: str) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}},
    }
    with pytest.raises(
        RequestError, match=rf"tools\[0\]\.function\.parameters: {keyword} cannot be enforced"
    ) as caught:
        matcher(FORMATS[name], read_toolbox([tool], "required"))
    assert caught.value.param == "tools[0].function.parameters"


def test_marks_that_are_control_tokens_are_those_tokens() -> None:
    format = CallFormat("f", "<tool>", "<|start|>")
    constraint = constraint_for(read_toolbox([GO], "required"), format, None, VOCABULARY)  # type: ignore[arg-type]
    assert constraint is not None
    assert f"start: <[{VOCABULARY.tool_id}]> (function_0) <[{VOCABULARY.start_id}]>" in str(constraint.value)

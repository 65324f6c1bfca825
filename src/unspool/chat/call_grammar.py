"""Grammars that constrain an answer to the calls that a request requires, with arguments that fit their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unspool.chat.call_formats import HARMONY, BareCall, CallFormat, NamedCall, ObjectCall, PythonCall
from unspool.chat.call_values import BareArguments, PythonArguments, TaggedArguments, marked, quoted
from unspool.chat.tools import MAX_SCHEMA_BYTES, Tool, Toolbox
from unspool.errors import RequestError
from unspool.params import Constraint

if TYPE_CHECKING:
    from unspool.text.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 4 * MAX_SCHEMA_BYTES
TEXT = r"TEXT: /(.|\n)*/"


def constraint_for(
    toolbox: Toolbox, format: CallFormat, answer: Constraint | None, tokenizer: Tokenizer
) -> Constraint | None:
    """The grammar of the whole answer: calls, or text (or the constraint `answer`) with calls in it."""
    if not toolbox.callable or not (toolbox.binds or answer is not None):
        return answer
    if format is HARMONY:
        start, rules = _harmony(toolbox, answer, tokenizer)
    elif toolbox.must_call:
        start, rules = _calls_only(toolbox, format, tokenizer), [TEXT]
    elif answer is None:
        start, rules = _text_with_calls(toolbox, format, tokenizer)
    else:
        start, rules = f"({_calls_only(toolbox, format, tokenizer)}) | {_as_rule(answer)}", [TEXT]
    for index, tool in enumerate(toolbox.callable):
        rules += _function(index, tool, toolbox, format, tokenizer)
    grammar = "\n".join(["%llguidance {}", f"start: {start}", *rules])
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"the tools' schemas have {len(grammar):,} characters together", "tools")
    return Constraint("grammar", grammar)


def _calls_only(toolbox: Toolbox, format: CallFormat, tokenizer: Tokenizer) -> str:
    if format.is_bare:
        return _run(toolbox, format)
    one = f"{marked(format.opens, tokenizer)} {_rest(toolbox, format, tokenizer)}"
    if not toolbox.parallel or format.more is not None:
        return one
    return f"{one} ({_joined(format.again, one)})*"


def _rest(toolbox: Toolbox, format: CallFormat, tokenizer: Tokenizer) -> str:
    """What follows an opening mark."""
    return _joined(format.lead, _run(toolbox, format), format.tail, marked(format.closes, tokenizer), raw=(1, 3))


def _run(toolbox: Toolbox, format: CallFormat) -> str:
    """The calls between two marks."""
    call = "(" + " | ".join(f"function_{index}" for index in range(len(toolbox.callable))) + ")"
    if format.more is None or not toolbox.parallel:
        return call
    return f"{call} ({_joined(format.more, call)})*"


def _joined(*parts: str, raw: tuple[int, ...] = (1,)) -> str:
    """A sequence; the parts at `raw` are rules already, the others are texts."""
    return " ".join(part if index in raw else quoted(part) for index, part in enumerate(parts) if part)


def _text_with_calls(toolbox: Toolbox, format: CallFormat, tokenizer: Tokenizer) -> tuple[str, list[str]]:
    if format.is_bare:  # a call is the whole answer, recognized by its first character
        return f"PLAIN | {_calls_only(toolbox, format, tokenizer)}", [r"PLAIN: /[^{](.|\n)*/ | //", TEXT]
    mark, rest = marked(format.opens, tokenizer), _rest(toolbox, format, tokenizer)
    repeat = "*" if toolbox.parallel else "?"
    if mark.startswith("<["):
        return f"(TEXT {mark} {rest}){repeat} TEXT", [TEXT]
    return f"(opening {rest}){repeat} TEXT", [f"opening[lazy]: TEXT {mark}", TEXT]


def _harmony(toolbox: Toolbox, answer: Constraint | None, tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """Messages: one may be analysis; then comes a call, which ends the answer, or the final one."""

    def part(text: str) -> str:
        return marked(text, tokenizer)

    functions = " | ".join(f"function_{index}" for index in range(len(toolbox.callable)))
    rules = [
        TEXT,
        f"analysis: {part('<|channel|>analysis<|message|>')} TEXT {part('<|end|><|start|>assistant')}",
        f"call: {part('<|channel|>commentary to=functions.')} ({functions})",
    ]
    if toolbox.must_call:
        return "analysis? call", rules
    final = "TEXT" if answer is None else f"({_as_rule(answer)})"
    return "analysis? (call | final)", [*rules, f"final: {part('<|channel|>final<|message|>')} {final}"]


def _as_rule(answer: Constraint) -> str:
    if answer.kind == "json_object":
        return '%json {"type": "object"}'
    if answer.kind == "json_schema":
        return f"%json {answer.value if isinstance(answer.value, str) else json.dumps(answer.value)}"
    raise RequestError(f"a {answer.kind} constraint and tools cannot be had at once", "constraint")


def _function(index: int, tool: Tool, toolbox: Toolbox, format: CallFormat, tokenizer: Tokenizer) -> list[str]:
    """The rules of one function's calls; the first is `function_INDEX`. A schema is a grammar of its own, so that its
    references keep their root."""
    schema, call, name = _arguments(tool.parameters or {}), format.call, f"function_{index}"
    if isinstance(call, ObjectCall):
        head = f'{{{call.extra}"{call.name_key}": {json.dumps(tool.name)}, "{call.arguments_key}": '
        if format.is_bare:  # an answer that is JSON may begin in the same way, so no word may span both
            head_rule = " ".join(quoted(part) for part in re.split(r'("[^"]*")', head) if part)
        else:
            head_rule = quoted(head)
        return [f'{name}: {head_rule} %json {json.dumps(schema)} "}}"']
    if isinstance(call, NamedCall):
        count = ' ":" /[0-9]+/' if call.counts else ""
        if call.id_mark:
            count = f" {marked(call.id_mark, tokenizer)} /[a-zA-Z0-9]{{9}}/"
        head = f"{marked(call.begins + call.prefix + tool.name, tokenizer)}{count} {marked(call.separator, tokenizer)}"
        return [f"{name}: {head} %json {json.dumps(schema)} {marked(call.ends, tokenizer)}".rstrip()]
    place = f"tools[{toolbox.tools.index(tool)}].function.parameters"
    if isinstance(call, BareCall):
        return BareArguments(name, call, schema, place, tokenizer).rules(tool.name)
    if isinstance(call, PythonCall):
        return PythonArguments(name, schema, place).rules(tool.name)
    return TaggedArguments(name, call, schema, place).rules(tool.name)


def _arguments(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a call's arguments. A function without declared parameters has none."""
    names_none = not parameters.get("properties") and parameters.keys() <= _NAMES_NO_PARAMETERS
    return {**parameters, "type": "object", "additionalProperties": False} if names_none else parameters


_NAMES_NO_PARAMETERS = frozenset({"type", "properties", "required", "title", "description", "$schema", "strict"})


def refusal_of(error: RequestError, field: str, toolbox: Toolbox, tokenizer: Tokenizer) -> RequestError:
    """A refused constraint's error, with the field that the caller sent, or with the tool whose schema it is."""
    from unspool.sampling.constraint import compile_constraint

    reason = str(error).removeprefix("constraint: ")
    for index, tool in enumerate(toolbox.tools if toolbox.binds else ()):
        if tool in toolbox.callable:
            place = f"tools[{index}].function.parameters"
            schema = Constraint("json_schema", dict(_arguments(tool.parameters or {})))
            try:
                compile_constraint(schema, tokenizer, param=place)
            except RequestError as refused:
                return refused
    return RequestError(f"{field}: {reason}", field, error.code)

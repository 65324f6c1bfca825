"""Grammars that hold an answer to the calls that a request demands, with arguments that fit their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unspool.chat.call_formats import CallFormat
from unspool.chat.tools import MAX_SCHEMA_BYTES, Tool, Toolbox
from unspool.errors import RequestError
from unspool.params import Constraint

if TYPE_CHECKING:
    from unspool.text.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 4 * MAX_SCHEMA_BYTES
TEXT = r"/(.|\n)*/"


def constraint_for(
    toolbox: Toolbox, format: CallFormat, answer: Constraint | None, tokenizer: Tokenizer
) -> Constraint | None:
    """The grammar of the whole answer: calls, or text (or what `answer` asks for) with calls in it."""
    if not toolbox.callable or not (toolbox.binds or answer is not None):
        return answer
    rules: list[str] = []
    if toolbox.must_call:
        start, rules = _calls_only(toolbox, format, tokenizer), []
    elif answer is None:
        start, rules = _text_with_calls(toolbox, format, tokenizer)
    else:
        start, rules = f"({_calls_only(toolbox, format, tokenizer)}) | {_as_rule(answer)}", []
    functions = [_function_rule(index, tool, format, tokenizer) for index, tool in enumerate(toolbox.callable)]
    grammar = "\n".join(["%llguidance {}", f"start: {start}", *rules, *functions])
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"the tools' schemas have {len(grammar):,} characters together", "tools")
    return Constraint("grammar", grammar)


def _calls_only(toolbox: Toolbox, format: CallFormat, tokenizer: Tokenizer) -> str:
    call, mark = _any_function(toolbox), _mark(format.opens, tokenizer)
    if format.argues:
        return f"({mark} {call})+" if toolbox.parallel else f"{mark} {call}"
    if format.closes:
        one = f'{mark} "\\n" {call} {_quoted(chr(10) + format.closes)}'
        return f'{one} ("\\n" {one})*' if toolbox.parallel else one
    if "[" in format.joins:
        more = f' (", " {call})*' if toolbox.parallel else ""
        return f'{mark} "[" {call}{more} "]"'
    return f'{call} ("; " {call})*' if toolbox.parallel else call


def _text_with_calls(toolbox: Toolbox, format: CallFormat, tokenizer: Tokenizer) -> tuple[str, list[str]]:
    if format.is_bare:  # a call is the whole answer, told by its first character
        return f"TEXT | {_calls_only(toolbox, format, tokenizer)}", [r"TEXT: /[^{](.|\n)*/ | //"]
    call, mark = _any_function(toolbox), _mark(format.opens, tokenizer)
    rest = f'"\\n" {call} {_quoted(chr(10) + format.closes)}' if format.closes else f'"[" {call} (", " {call})* "]"'
    rest = call if format.argues else rest
    repeat = "*" if toolbox.parallel else "?"
    if mark.startswith("<["):
        return f"(TEXT {mark} {rest}){repeat} TEXT", [f"TEXT: {TEXT}"]
    return f"(opening {rest}){repeat} TEXT", [f"opening[lazy]: TEXT {mark}", f"TEXT: {TEXT}"]


def _as_rule(answer: Constraint) -> str:
    if answer.kind == "json_object":
        return '%json {"type": "object"}'
    if answer.kind == "json_schema":
        return f"%json {answer.value if isinstance(answer.value, str) else json.dumps(answer.value)}"
    raise RequestError(f"a {answer.kind} constraint and tools cannot be had at once", "constraint")


def _any_function(toolbox: Toolbox) -> str:
    return "(" + " | ".join(f"function_{index}" for index in range(len(toolbox.callable))) + ")"


def _function_rule(index: int, tool: Tool, format: CallFormat, tokenizer: Tokenizer) -> str:
    """One call's object. The schema stands as a grammar of its own, so that its references keep their root."""
    schema = json.dumps(_arguments(tool.parameters or {}))
    if format.argues:
        return f"function_{index}: {_quoted(tool.name)} {_mark(format.argues, tokenizer)} %json {schema}"
    head = f'{{"{format.name_key}": {json.dumps(tool.name)}, "{format.key}": '
    return f'function_{index}: {_quoted(head)} %json {schema} "}}"'


def _arguments(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a call's arguments. A function that names no parameters takes none."""
    names_none = not parameters.get("properties") and parameters.keys() <= _NAMES_NO_PARAMETERS
    return {**parameters, "type": "object", "additionalProperties": False} if names_none else parameters


_NAMES_NO_PARAMETERS = frozenset({"type", "properties", "required", "title", "description", "$schema", "strict"})


def refusal_of(error: RequestError, field: str, toolbox: Toolbox, tokenizer: Tokenizer) -> RequestError:
    """A refused constraint in the words of whoever sent it as `field`, or as schemas of tools: the tool is named."""
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


def _mark(mark: str, tokenizer: Tokenizer) -> str:
    """A mark that the vocabulary has as one control token is that token, else it is text."""
    ids = tokenizer.encode(mark, add_special=False, parse_special=True)
    if len(ids) == 1 and ids[0] in tokenizer.special_ids:
        return f"<[{ids[0]}]>"
    return _quoted(mark)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

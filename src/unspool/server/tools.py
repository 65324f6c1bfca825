"""Tools in a request: how they are shown to the model, and what the answer must look like when they bind it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unspool.errors import RequestError
from unspool.params import Constraint
from unspool.server.calls import GENERIC, CallFormat
from unspool.server.fields import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH

if TYPE_CHECKING:
    from unspool.text.tokenizer import Tokenizer

TEXT = r"/(.|\n)*/"


@dataclass(frozen=True)
class Tool:
    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def as_template(self) -> dict[str, Any]:
        """As chat templates expect it, which is OpenAI's way."""
        schema = self.parameters if self.parameters is not None else {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Toolbox:
    """The tools of one request: the model sees all of them and may call those in `allowed` (None: all)."""

    tools: tuple[Tool, ...] = ()
    allowed: frozenset[str] | None = None
    must_call: bool = False
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that the model may call."""
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)

    @property
    def binds(self) -> bool:
        """Whether what the model writes must be held to a grammar."""
        return self.must_call or any(tool.strict for tool in self.callable)


def make_toolbox(
    tools: Sequence[Tool], choice: str, *, allowed: Sequence[str] | None = None, parallel: bool = True
) -> Toolbox:
    """`choice`: auto, none or required; `allowed`: the names that tool_choice gives, if it gives any."""
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"tools has two functions named {name!r}", f"tools[{index}]")
    for name in allowed or ():
        if name not in names:
            raise RequestError(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
    if not tools and choice == "required":
        raise RequestError(f"tool_choice is {choice!r} but there are no tools", "tool_choice")
    for index, tool in enumerate(tools):
        check_schema_size(tool.parameters, f"tools[{index}].parameters")
    may_call = frozenset() if choice == "none" else frozenset(allowed) if allowed is not None else None
    return Toolbox(tuple(tools), may_call, choice == "required", parallel)


def check_schema_size(schema: Any, param: str) -> None:
    size = len(schema) if isinstance(schema, str) else len(json.dumps(schema))
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(f"{param} has {size:,} characters; at most {MAX_SCHEMA_BYTES:,} are taken", param)
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [item for value in level for item in _inside(value)]
    if level:
        raise RequestError(f"{param} nests deeper than {MAX_SCHEMA_DEPTH} levels", param)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def describe(tools: Sequence[Tool]) -> str:
    """For a template without a place for tools: what the system's message says instead."""
    listed = "\n".join(json.dumps(tool.as_template(), ensure_ascii=False) for tool in tools)
    return (
        f"You may call functions. These are available:\n<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and arguments as a JSON object within <tool_call></tool_call>:\n"
        '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
    )


# Grammars -----------------------------------------------------------------------------------------------------------
def constraint_for(
    toolbox: Toolbox, format: CallFormat, answer: Constraint | None, tokenizer: Tokenizer
) -> Constraint | None:
    """What the whole answer must look like: calls, or text (or what `answer` says) with calls in it."""
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
    return Constraint("grammar", "\n".join(["%llguidance {}", f"start: {start}", *rules, *functions]))


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
    schema = json.dumps(tool.parameters) if tool.parameters else '{"type": "object"}'
    if format.argues:
        return f"function_{index}: {_quoted(tool.name)} {_mark(format.argues, tokenizer)} %json {schema}"
    head = f'{{"name": {json.dumps(tool.name)}, "{format.key}": '
    return f'function_{index}: {_quoted(head)} %json {schema} "}}"'


def _mark(mark: str, tokenizer: Tokenizer) -> str:
    """A mark that the vocabulary has as one control token is that token, else it is text."""
    ids = tokenizer.encode(mark, add_special=False, parse_special=True)
    if len(ids) == 1 and ids[0] in tokenizer.special_ids:
        return f"<[{ids[0]}]>"
    return _quoted(mark)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def with_description(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The conversation with its tools told in the system's message, for a template that has no place for them; calls
    and results in it become text, in the same format."""
    text = describe(tools)
    told = [_as_text(message) for message in messages]
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        f"{GENERIC.opens}\n{json.dumps(call['function'], ensure_ascii=False)}\n{GENERIC.closes}" for call in calls
    ]
    content = "\n".join([*([message["content"]] if message["content"] else []), *written])
    return {"role": "assistant", "content": content}

"""The tools of a request, and their description for models whose template does not support tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unspool.chat.call_formats import GENERIC, GENERIC_CALL
from unspool.errors import RequestError
from unspool.records import record

MAX_SCHEMA_BYTES = 64 * 1024  # of a JSON schema, grammar or expression, as text
MAX_SCHEMA_DEPTH = 200  # of a JSON schema


@record(frozen=True)
class Tool:
    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it, which is OpenAI's form."""
        schema = self.parameters if self.parameters is not None else {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


@record(frozen=True)
class Toolbox:
    """The tools of one request: the model sees all of them and may call those in `allowed` (None: all)."""

    tools: tuple[Tool, ...] = ()
    allowed: frozenset[str] | None = None
    must_call: bool = False
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)

    @property
    def binds(self) -> bool:
        """Whether a grammar must constrain the answer."""
        return self.must_call or any(tool.strict for tool in self.callable)


def read_toolbox(tools: Sequence[Mapping[str, Any]], choice: Any = "auto", *, parallel: bool = True) -> Toolbox:
    """A toolbox from OpenAI's `tools` and `tool_choice`, already checked. A choice of one function means one call of
    it, as in OpenAI's API."""
    mode, names = choice, None
    if isinstance(choice, Mapping) and choice["type"] == "allowed_tools":
        allowed = choice["allowed_tools"]
        mode, names = allowed["mode"], [tool["function"]["name"] for tool in allowed["tools"]]
    elif isinstance(choice, Mapping):
        mode, names, parallel = "required", [choice["function"]["name"]], False
    return make_toolbox([read_tool(tool["function"]) for tool in tools], mode, allowed=names, parallel=parallel)


def read_tool(function: Mapping[str, Any]) -> Tool:
    strict = bool(function.get("strict"))
    return Tool(function["name"], function.get("description") or "", function.get("parameters"), strict)


def check_tools(tools: Any, choice: Any) -> None:
    """Check `tools` and `tool_choice` from a Python caller; a RequestError names the wrong field."""
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools: expected a list of tools, got {type(tools).__name__}", "tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError(
                f'tools[{index}]: expected {{"type": "function", "function": {{…}}}}, got {tool!r:.60}',
                f"tools[{index}]",
            )
        for name, kinds in (("name", str), ("description", str), ("parameters", Mapping), ("strict", bool)):
            value = function.get(name)
            if (value is not None and not isinstance(value, kinds)) or (name == "name" and not value):
                where = f"tools[{index}].function.{name}"
                raise RequestError(f"{where} is {value!r:.60}; expected {_KIND_NAMES[kinds]}", where)
    if choice not in ("auto", "none", "required") and not _is_choice(choice):
        raise RequestError(
            f'tool_choice is {choice!r:.60}; allowed: "auto", "none", "required" or a function in OpenAI\'s form',
            "tool_choice",
        )


_KIND_NAMES: dict[type, str] = {str: "a string", Mapping: "a JSON schema", bool: "true or false"}


def _is_choice(choice: Any) -> bool:
    """Whether it has the form of a function, or of a list of allowed ones."""
    match choice:
        case {"type": "function", "function": {"name": str()}}:
            return True
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": [*tools]}}:
            return bool(tools) and all(_is_choice(tool) and tool["type"] == "function" for tool in tools)
    return False


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


# For templates without a place for tools ----------------------------------------------------------------------------
def describe(tools: Sequence[Tool]) -> str:
    """The description of the tools in a message."""
    listed = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    call = f'{{"{GENERIC_CALL.name_key}": <name>, "{GENERIC_CALL.arguments_key}": <arguments>}}'
    return (
        f"You may call functions. These are available:\n<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and arguments as a JSON object within <tool_call></tool_call>:\n"
        f"{GENERIC.opens}\n{call}\n{GENERIC.closes}"
    )


def with_description(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
    """The conversation with its tools described before the first user message; calls and results become text in that
    format. The system message is not used, because it would replace a template's default one."""
    described = [_as_text(message) for message in messages]
    for index, message in enumerate(described):
        if message["role"] == "user":
            described[index] = {**message, "content": f"{describe(tools)}\n\n{message['content']}"}
            return described
    return [{"role": "user", "content": describe(tools)}, *described]


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"{GENERIC.opens}\n{_written(call['function'])}\n{GENERIC.closes}" for call in calls]
    content = "\n".join([*([message["content"]] if message["content"] else []), *written])
    return {"role": "assistant", "content": content}


def _written(function: Mapping[str, Any]) -> str:
    call = {GENERIC_CALL.name_key: function["name"], GENERIC_CALL.arguments_key: function["arguments"]}
    return json.dumps(call, ensure_ascii=False)

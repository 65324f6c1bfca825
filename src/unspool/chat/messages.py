"""Messages in OpenAI's form: checks those given in Python, and converts them for chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from unspool.errors import RequestError

Record = dict[str, Any]
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # one field; its name differs between APIs


# Checking -----------------------------------------------------------------------------------------------------------
def check_messages(messages: Any) -> None:
    """Raises a RequestError that names the first wrong field. Roles and further fields are not checked here; the
    template defines them.

    Content may be a string, a list of text parts, or absent if the message has tool calls.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages: expected a list of messages, got {type(messages).__name__}", "messages")
    if not messages:
        raise RequestError("messages: must not be empty", "messages")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")


def _check_message(message: Any, name: str) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(f"{name}: expected an object, got {type(message).__name__}", name)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{name}.role: expected a string, got {role!r:.40}", f"{name}.role")
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list | tuple) or not all(isinstance(c, Mapping) for c in calls)):
        raise RequestError(f"{name}.tool_calls: expected a list of objects, got {calls!r:.40}", f"{name}.tool_calls")
    for field in REASONING_FIELDS:
        if message.get(field) is not None and not isinstance(message[field], str):
            raise RequestError(f"{name}.{field}: expected a string, got {message[field]!r:.40}", f"{name}.{field}")
    check_token_ids(message.get("token_ids"), f"{name}.token_ids")
    content = message.get("content")
    if content is not None:
        _check_content(content, f"{name}.content")
    elif not calls and not any(message.get(field) for field in (*REASONING_FIELDS, "token_ids")):
        raise RequestError(f"{name}.content: missing", f"{name}.content")


def check_token_ids(ids: Any, name: str) -> None:
    """Check the token ids of a model's answer, if they are given."""
    is_list = isinstance(ids, list | tuple) and all(isinstance(id, int) and not isinstance(id, bool) for id in ids)
    if ids is not None and not is_list:
        raise RequestError(f"{name}: expected a list of token ids, got {ids!r:.40}", name)


def _check_content(content: Any, name: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise RequestError(f"{name}: expected a string or a list of parts, got {type(content).__name__}", name)
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"{name}[{index}].type: only 'text' can be read, got {kind!r}", f"{name}[{index}].type")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{name}[{index}].text: expected a string", f"{name}[{index}].text")


# For templates ------------------------------------------------------------------------------------------------------
def for_template(messages: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Checked messages with their content as one text (or None), reasoning under every name that templates have for it,
    the arguments of calls as objects, and the name of the called function in its result."""
    names: dict[str, str] = {}  # of called functions, by the call's id
    converted = []
    for message in messages:
        content, calls = message.get("content"), message.get("tool_calls")
        record: Record = {**message, "content": None if content is None else text_of(content)}
        record.pop("tool_calls", None)
        reasoning = next((message[field] for field in REASONING_FIELDS if message.get(field)), None)
        for field in REASONING_FIELDS:
            record.pop(field, None)
            if reasoning is not None and message["role"] == "assistant":
                record[field] = reasoning
        if calls:
            record["tool_calls"] = [call_for_template(call) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in record["tool_calls"] if call.keys() >= _NAMED}
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            record.setdefault("name", names[message["tool_call_id"]])
        converted.append(record)
    return converted


_NAMED = {"id", "function"}


def text_of(content: Any) -> str:
    """Content as one text: a string, text parts, or nothing."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def call_for_template(call: Mapping[str, Any]) -> Record:
    """Templates format a call's arguments themselves, so they need the object. Text that is not a JSON object stays
    text, and a call in another form than OpenAI's is unchanged."""
    function = call.get("function")
    if not isinstance(function, Mapping) or "name" not in function:
        return dict(call)
    arguments = function.get("arguments", {})
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    function = {"name": function["name"], "arguments": parsed if isinstance(parsed, Mapping) else arguments}
    return {"type": "function", "function": function, **({"id": call["id"]} if "id" in call else {})}

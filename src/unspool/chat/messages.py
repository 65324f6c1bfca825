"""Messages in OpenAI's form, made into those that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Record = dict[str, Any]


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Valid messages with their content as one text, the arguments of calls as objects, and results with the name of
    the function that was called."""
    names: dict[str, str] = {}  # of called functions, by the call's id
    out = []
    for message in messages:
        content = message.get("content")
        plain: Record = {**message, "content": None if content is None else text_of(content)}
        if message.get("tool_calls"):
            plain["tool_calls"] = [call_for_template(call) for call in message["tool_calls"]]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"] if "id" in call}
        else:
            plain.pop("tool_calls", None)
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            plain.setdefault("name", names[message["tool_call_id"]])
        out.append(plain)
    return out


def text_of(content: Any) -> str:
    """Content as one text: a string, text parts, or nothing."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def call_for_template(call: Mapping[str, Any]) -> Record:
    """Templates write a call's arguments themselves, so they want the object; text that holds none stays text."""
    arguments = call["function"]["arguments"]
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    function = {"name": call["function"]["name"], "arguments": parsed if isinstance(parsed, Mapping) else arguments}
    return {"type": "function", "function": function, **({"id": call["id"]} if "id" in call else {})}

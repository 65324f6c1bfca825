"""A conversation: a system message, then turns; saved and loaded as JSON."""

from __future__ import annotations

import json
from dataclasses import field
from pathlib import Path
from typing import Any

from unspool.errors import RequestError
from unspool.records import record

Message = dict[str, str]


@record
class Conversation:
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.turns]

    def say(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})

    def take_back(self) -> str | None:
        """Drops the last exchange: the user's last message and everything after it. Returns that message, if any."""
        for index in range(len(self.turns) - 1, -1, -1):
            if self.turns[index]["role"] == "user":
                content = self.turns[index]["content"]
                del self.turns[index:]
                return content
        return None

    def save(self, path: str, **more: Any) -> None:
        text = json.dumps({**more, "messages": self.messages()}, ensure_ascii=False, indent=2)
        try:
            Path(path).expanduser().write_text(text + "\n", "utf-8")
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: str) -> None:
        """Replaces the conversation by that of a file: a list of messages, or an object with one."""
        try:
            data = json.loads(Path(path).expanduser().read_text("utf-8"))
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise RequestError(f"{path} is not a conversation: {error}") from error
        messages = data.get("messages") if isinstance(data, dict) else data
        if not isinstance(messages, list):
            raise RequestError(f"{path} is not a conversation: it holds no list of messages")
        for index, message in enumerate(messages):
            known = isinstance(message, dict) and message.get("role") in ("system", "user", "assistant")
            if not known or not isinstance(message.get("content"), str):
                raise RequestError(f"{path}: message {index} has no role and text that are known here")
        heads = [message["content"] for message in messages if message["role"] == "system"]
        self.system = "\n\n".join(heads) if heads else None
        self.turns = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] != "system"]

"""Chat templates: messages in, the one text a model was taught to continue out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unspool.errors import ModelError, RequestError

MAX_SOURCE = 1024 * 1024  # the longest template in the wild has some tens of thousands of characters


class ChatTemplate:
    """A model's own template (jinja2, sandboxed and bounded), parsed once.

    A template that does not parse is the model's fault (ModelError); one that refuses or cannot take the messages
    is the request's (RequestError on `messages`, with the template's own words).
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        if len(source) > MAX_SOURCE:
            raise ModelError(f"chat template: {len(source):,} characters; at most {MAX_SOURCE:,} are read")
        import jinja2

        from unspool.text.sandbox import BoundedEnvironment

        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._environment = BoundedEnvironment()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template: line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError) as error:
            raise ModelError(f"chat template: too deep to compile ({type(error).__name__})") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for these messages. Other keyword arguments are the template's own (`enable_thinking`, …)."""
        from unspool.text.sandbox import LimitError, TemplateRaisedError

        variables = {
            **self._tokens,
            **kwargs,
            "messages": validate_messages(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._collect(variables)
        except TemplateRaisedError as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}", "messages") from error
        except LimitError as error:
            raise RequestError(f"messages: the chat template was stopped: {error}", "messages") from error
        except Exception as error:  # a template is a program by a stranger: whatever it raises, the caller is told
            raise RequestError(
                f"messages: the chat template failed on them: {type(error).__name__}: {error}", "messages"
            ) from error

    def _collect(self, variables: Mapping[str, Any]) -> str:
        from unspool.text.sandbox import MAX_TEXT, LimitError

        self._environment.renew()
        chunks, length = [], 0
        for chunk in self._template.generate(variables):
            length += len(chunk)
            if length > MAX_TEXT:
                raise LimitError(f"a prompt of more than {MAX_TEXT:,} characters")
            chunks.append(chunk)
        return "".join(chunks)


def validate_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages as templates expect them; a RequestError names the first field that is wrong.

    Content may be a string, or a list of text parts (joined here, since most templates know only strings), or
    absent where the message carries tool calls instead.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages: expected a list of messages, got {type(messages).__name__}", "messages")
    if not messages:
        raise RequestError("messages: must not be empty", "messages")
    return [_validate_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _validate_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{name}: expected an object, got {type(message).__name__}", name)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{name}.role: expected a string, got {role!r:.40}", f"{name}.role")
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list | tuple) or not all(isinstance(c, Mapping) for c in calls)):
        raise RequestError(f"{name}.tool_calls: expected a list of objects, got {calls!r:.40}", f"{name}.tool_calls")
    content = message.get("content")
    if content is None and not calls:
        raise RequestError(f"{name}.content: missing", f"{name}.content")
    return {**message, "content": "" if content is None else _content_text(content, f"{name}.content")}


def _content_text(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{name}: expected a string or a list of parts, got {type(content).__name__}", name)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"{name}[{index}].type: only 'text' can be read, got {kind!r}", f"{name}[{index}].type")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{name}[{index}].text: expected a string", f"{name}[{index}].text")
        texts.append(part["text"])
    return "".join(texts)

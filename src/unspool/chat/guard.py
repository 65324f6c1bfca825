"""Text in messages never becomes a control token: `<|im_end|>` in a message must not end that message.

A chat template joins control tokens and messages into one text, in which they cannot be distinguished. So before it
runs, every control token's name inside a message is replaced by a number between two marks that do not occur in the
messages. Afterwards each number is replaced by the characters of the name, encoded as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unspool.errors import RequestError

if TYPE_CHECKING:
    from unspool.chat.template import ChatTemplate
    from unspool.text.tokenizer import Tokenizer

# Private-use characters; with a number between them they are a mark.
OPEN, CLOSE = "\ue000", "\ue001"


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    end: str = "",
) -> tuple[list[int], str] | None:
    """Token ids of a conversation and the rendered text. Control tokens of the template are control tokens; those in
    messages are text. If `end` is given, a text that occurs once in the messages, the prompt ends there; None: the
    template does not show it."""
    try:
        written = "\0".join(texts_in((messages, options)))
    except RecursionError:
        raise RequestError("messages: they are nested too deep", "messages") from None
    control = tokenizer.control_marks
    if not any(isinstance(part, int) for part in control.split(written)):
        text = template.render(messages, **options)
        if end not in text:
            return None
        text = text[: text.rindex(end)] if end else text
        return tokenizer.encode(text, parse_special=True), text
    mark = _unused_mark(written)

    def guarded(value: Any) -> Any:
        if isinstance(value, str):
            return "".join(part if isinstance(part, str) else f"{mark}{part}{mark}" for part in control.split(value))
        if isinstance(value, Mapping):
            return {guarded(key): guarded(item) for key, item in value.items()}
        return [guarded(item) for item in value] if isinstance(value, list | tuple) else value

    text = template.render(guarded(messages), **{name: guarded(value) for name, value in options.items()})
    if end not in text:
        return None
    text = text[: text.rindex(end)] if end else text
    ids: list[int] = []
    # A template may cut a text in the middle of a mark: what is left of it is text like any other.
    for index, piece in enumerate(re.split(f"{mark}([0-9]{{1,9}}){mark}", text)):
        if index % 2:
            ids += tokenizer.encode(tokenizer.token_text(int(piece)), add_special=False)
        elif piece or index == 0:
            ids += tokenizer.encode(piece, add_special=index == 0, parse_special=True)
    return ids, text


def unused_end(written: Any) -> str:
    """A text that does not occur in the messages, to find a position in the rendered text."""
    number, text = 0, "\0".join(texts_in(written))
    while (end := f"{OPEN}end{number}{CLOSE}") in text:
        number += 1
    return end


def _unused_mark(written: str) -> str:
    """A text that does not occur in the messages, nor overlaps with them: its first and its last character occur in it
    once."""
    used = set(re.findall(f"{OPEN}([0-9]+){CLOSE}", written))
    number = 0
    while str(number) in used:
        number += 1
    return f"{OPEN}{number}{CLOSE}"


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_in(key)
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)

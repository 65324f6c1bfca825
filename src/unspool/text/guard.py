"""What people write is text, never control: `<|im_end|>` in a message must not end that message.

A chat template joins control tokens and messages into one text, in which they can no longer be told apart. So before
it runs, every control token's name inside a message is put behind a mark that nobody wrote; afterwards the text is cut
at the marks, and what stood behind them is encoded as the plain characters it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unspool.text.chat import ChatTemplate
    from unspool.text.tokenizer import Tokenizer

PRIVATE_USE = range(0xE000, 0xF8FF)  # characters that no standard gives a meaning


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[int]:
    """Token ids of a conversation: the template's control tokens are control tokens, the messages' are not."""
    names = sorted(_control_names(tokenizer), key=len, reverse=True)  # of names within names the longer one is meant
    written = repr((messages, options))
    found = [name for name in names if name in written]
    if not found:
        return tokenizer.encode(template.render(messages, **options), parse_special=True)
    mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in written and f"\\u{code:04x}" not in written)

    def guarded(value: Any) -> Any:
        if isinstance(value, str):
            for index, name in enumerate(found):
                value = value.replace(name, f"{mark}{index}{mark}")
            return value
        if isinstance(value, Mapping):
            return {key: guarded(item) for key, item in value.items()}
        return [guarded(item) for item in value] if isinstance(value, list | tuple) else value

    text = template.render(guarded(messages), **guarded(options))
    ids: list[int] = []
    for index, piece in enumerate(text.split(mark)):
        if index % 2:
            ids += tokenizer.encode(found[int(piece)], add_special=False)
        elif piece or index == 0:
            ids += tokenizer.encode(piece, add_special=index == 0, parse_special=True)
    return ids


def _control_names(tokenizer: Tokenizer) -> set[str]:
    return {tokenizer.token_bytes(id).decode("utf-8", "replace") for id in tokenizer.special_ids} - {""}

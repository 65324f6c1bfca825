"""Token ids to text, one at a time, never half a character.

    push(E2) → ""      push(98 83) → "☃"      push(C3) → ""      flush() → "\\ufffd"

A token is bytes; a character may take several tokens. Bytes that cannot start or continue a character become
U+FFFD exactly where decoding the whole at once would have put it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_Utf8 = codecs.getincrementaldecoder("utf-8")


class _Tokens(Protocol):
    special_ids: frozenset[int]
    strips_leading_space: bool

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """The text of a growing sequence of ids: what `push` and `flush` return, joined, is the whole.

    `prompt_ids` come before: the answer continues their text, so the space that encoding puts in front of a text
    (SentencePiece style) is taken away only when nothing but marks precedes.
    """

    def __init__(self, tokenizer: _Tokens, *, skip_special: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._special = tokenizer.special_ids
        self._skip_special = skip_special
        self._utf8 = _Utf8("replace")
        self._at_start = tokenizer.strips_leading_space and all(i in self._special for i in prompt_ids)

    def push(self, token_id: int) -> str:
        """The characters that this id completes."""
        if token_id in self._special:
            return "" if self._skip_special else self._utf8.decode(self._token_bytes(token_id))
        data = self._token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left when no more ids come: nothing, or U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)

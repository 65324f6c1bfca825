"""Token ids to text, one at a time, never half a character.

    push(E2) → ""      push(98 83) → "☃"      push(C3) → ""      flush() → "\\ufffd"

A token is bytes; a character may take several tokens. Bytes that cannot start or continue a character become
U+FFFD at exactly the same places as if the whole were decoded at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

_Utf8 = codecs.getincrementaldecoder("utf-8")
# By tokenizer: a cache of the texts of ids that are whole characters.
_whole_texts: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()


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
        self._whole = _whole_texts.setdefault(tokenizer, {})
        self._is_plain = not self._at_start  # nothing is held, so that a token of whole characters is their text

    def push(self, token_id: int) -> str:
        """The characters that this id completes."""
        if self._is_plain:
            text = self._whole.get(token_id)
            if text is not None:
                return text
        text = self._decode(token_id)
        if self._is_plain and token_id not in self._special and not self._held():
            self._whole[token_id] = text
        self._is_plain = not self._at_start and not self._held()
        return text

    def _held(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def _decode(self, token_id: int) -> str:
        if token_id in self._special:
            return "" if self._skip_special else self._utf8.decode(self._token_bytes(token_id))
        data = self._token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The rest after the last id: nothing, or U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)

"""A tokenizer as llguidance sees it: a trie of the tokens' bytes, and a way to cut forced text into tokens."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_MAX_KEPT = 4
_WINDOW = 256  # characters of a forced text that the tokenizer cuts; the rest is cut when it comes first


class Tokenizer(Protocol):
    """The part of `unspool.text.tokenizer.Tokenizer` that a constraint needs."""

    vocab_size: int

    @property
    def special_ids(self) -> Collection[int]: ...

    @property
    def eos_ids(self) -> Collection[int]: ...

    @property
    def fingerprint(self) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, *, add_special: bool = ...) -> list[int]: ...


class Vocabulary:
    """Built once for a tokenizer (0.2 s for 49,000 tokens), shared by all its constraints."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance

        self.size = tokenizer.vocab_size
        self.num_words = (self.size + 31) // 32
        self.end_ids = frozenset(tokenizer.eos_ids)
        special = self.end_ids | frozenset(tokenizer.special_ids)
        callback: Any = _Callback(tokenizer, special)
        self.native = llguidance.LLTokenizer(callback, eos_token=sorted(self.end_ids))
        callback.native = self.native
        self.ends = np.zeros(self.num_words, np.uint32)
        for token in self.end_ids:
            self.ends[token // 32] |= np.uint32(1 << (token % 32))
        named = {token: tokenizer.token_bytes(token).decode("utf-8", "replace") for token in special - self.end_ids}
        self.special = {name: token for token, name in named.items()}
        # What a mask may hold: no special token but the ends and those that a grammar names.
        self.text: NDArray[np.uint32] = ~np.zeros(self.num_words, np.uint32)
        for token in special - self.end_ids:
            self.text[token // 32] &= ~np.uint32(1 << (token % 32))
        if self.size % 32:
            self.text[-1] &= np.uint32((1 << (self.size % 32)) - 1)
        self.named: frozenset[int] = frozenset()

    def allowing(self, special: frozenset[int]) -> Vocabulary:
        """The same, for a grammar that names these special tokens."""
        if not special:
            return self
        other = copy.copy(self)
        other.named = special
        other.text = self.text.copy()
        for token in special:
            other.text[token // 32] |= np.uint32(1 << (token % 32))
        return other


class _Callback:
    """What llguidance asks of a tokenizer. Special tokens are marked, so that their letters never stand for them."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.native: Any = None
        self.eos_token_id = min(tokenizer.eos_ids)
        self.special_token_ids = sorted(special)
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self._drop_duplicates(special)

    def _drop_duplicates(self, special: frozenset[int]) -> None:
        """Keep one of several tokens with the same bytes: the one that the tokenizer writes. The others are never
        allowed. (SentencePiece has each ASCII character twice: as a piece and as a byte.)"""
        by_bytes: dict[bytes, list[int]] = {}
        for token, data in enumerate(self.tokens):
            if data and token not in special:
                by_bytes.setdefault(data, []).append(token)
        for data, same in by_bytes.items():
            if len(same) > 1:
                kept = self._written(data, same)
                for token in same:
                    if token != kept:
                        self.tokens[token] = b""

    def _written(self, data: bytes, same: list[int]) -> int:
        """The one of these tokens, which all stand for `data`, that the tokenizer writes. A text of blanks alone may
        become other tokens than a blank within a text, so both are tried."""
        text = data.decode("utf-8", "replace")
        for sample in (text, f"\n{text}\n"):
            written = [token for token in self._encode(sample) if token in same]
            if written:
                return written[-1]
        return same[0]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text inside an answer, whose bytes are exactly the text's. A tokenizer that puts a space in
        front of every text is given a line break before it, which is cut off again. Where neither way gives the
        text's bytes, the longest tokens that fit are taken instead."""
        window = text[:_WINDOW]
        tokens = self._exact(self._encode(window), window) or self._after_line_break(window)
        if tokens is None:
            tokens = self.native.greedy_tokenize(window)
        return tokens + self.native.greedy_tokenize(text[_WINDOW:]) if len(text) > _WINDOW else tokens

    def _after_line_break(self, text: str) -> list[int] | None:
        tokens, read = self._encode(f"\n{text}"), b""
        for index, token in enumerate(tokens):
            read += self.tokens[token]
            if read.endswith(b"\n"):
                return self._exact(tokens[index + 1 :], text)
        return None

    def _exact(self, tokens: list[int], text: str) -> list[int] | None:
        """The tokens, if their bytes are the text's and each may be used."""
        usable = all(self.tokens[token] for token in tokens)
        return tokens if usable and b"".join(self.tokens[token] for token in tokens) == text.encode() else None


_lock = threading.Lock()
_kept: OrderedDict[str, Vocabulary] = OrderedDict()


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The tokenizer's vocabulary, built at its first constraint."""
    with _lock:
        found = _kept.get(tokenizer.fingerprint)
        if found is None:
            found = _kept[tokenizer.fingerprint] = Vocabulary(tokenizer)
        _kept.move_to_end(tokenizer.fingerprint)
        while len(_kept) > _MAX_KEPT:
            _kept.popitem(last=False)
        return found

"""Answers from dice: a constraint followed by a model that knows nothing, to see what the constraint alone ensures.

A uniform choice among allowed tokens almost never closes a string, so the dice are loaded: they like short tokens, and
the longer the answer gets the more they like whatever closes something.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from unspool.sampling.constraint import Matcher
    from unspool.text.tokenizer import Tokenizer

_CLOSING = frozenset(b'"}],:')


@dataclass(frozen=True)
class Walk:
    tokens: tuple[int, ...]  # without the end token
    text: bytes
    finished: bool  # False: cut at the limit


class Dice:
    """Loaded once for a vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self._ends = np.array(sorted(tokenizer.eos_ids))
        self._lengths = np.array([len(data) for data in self._bytes])
        self._closing = np.array([bool(data) and _CLOSING.issuperset(data) for data in self._bytes])
        self._by_bytes = {data: token for token, data in enumerate(self._bytes) if data}
        for token in tokenizer.special_ids:
            self._by_bytes.pop(self._bytes[token], None)
        self._longest = max(map(len, self._by_bytes))

    def walk(self, matcher: Matcher, rng: np.random.Generator, *, limit: int = 400, haste: float = 1.0) -> Walk:
        """One answer. With more `haste` the dice close sooner."""
        tokens: list[int] = []
        while len(tokens) < limit:
            token = self.roll(allowed(matcher.mask(), len(self._bytes)), len(tokens) * haste, rng)
            matcher.accept(token)
            if token in self._ends:
                return Walk(tuple(tokens), self.text(tokens), True)
            tokens.append(token)
        return Walk(tuple(tokens), self.text(tokens), False)

    def roll(self, ids: NDArray[np.intp], length: float, rng: np.random.Generator) -> int:
        if not len(ids):
            raise ValueError("no token is allowed")
        hurry = min(0.95, 0.1 + length / 60)
        ends = ids[np.isin(ids, self._ends)]
        if len(ends) and (len(ends) == len(ids) or rng.random() < max(0.3, hurry)):
            return int(rng.choice(ends))
        ids = ids[~np.isin(ids, self._ends)]
        for wanted in (self._closing[ids], self._lengths[ids] == 1):
            if wanted.any() and rng.random() < hurry:
                return int(rng.choice(ids[wanted]))
        return int(rng.choice(ids))

    def text(self, tokens: list[int]) -> bytes:
        return b"".join(self._bytes[token] for token in tokens)

    def spells(self, matcher: Matcher, text: bytes) -> bool:
        """Whether this text can be the whole answer."""
        return self.text(self.cut(matcher, text)) == text and matcher.is_accepting

    def cut(self, matcher: Matcher, text: bytes) -> list[int]:
        """The text's tokens, the longest allowed one each time; fewer where none is allowed. The matcher follows."""
        tokens: list[int] = []
        at = 0
        while at < len(text):
            token = next((token for token in self._prefixes(text, at) if matcher.check(token)), None)
            if token is None:
                break
            matcher.accept(token)
            tokens.append(token)
            at += len(self._bytes[token])
        return tokens

    def _prefixes(self, text: bytes, at: int) -> Iterator[int]:
        for length in range(min(self._longest, len(text) - at), 0, -1):
            token = self._by_bytes.get(text[at : at + length])
            if token is not None:
                yield token


def allowed(mask: NDArray[np.uint32], vocab_size: int) -> NDArray[np.intp]:
    """The token ids whose bit is set."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])

"""The tokens of a running sequence and how often each occurred; a step is cheap and can be undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unspool.lazy import np
from unspool.params import ResolvedParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I32 = NDArray[np.int32]


class Counts:
    """How often each token occurs among the last `window` tokens from `start` on (-1: all of them).

    `ids` and `counts` run in step and hold every token ever counted; one that left the window stays with count 0.
    """

    def __init__(self, tokens: I32, start: int, window: int) -> None:
        self.start = start
        self.window = window
        seen = tokens[start:] if window < 0 else tokens[max(start, tokens.size - window) :]
        ids, counts = np.unique(seen, return_counts=True)
        self._slots = {int(token): slot for slot, token in enumerate(ids)}
        self._ids, self._counts = ids.astype(np.int32), counts.astype(np.int32)

    @property
    def ids(self) -> I32:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> I32:
        return self._counts[: len(self._slots)]

    def push(self, tokens: I32) -> None:
        """The last of `tokens` has just been written."""
        self._add(int(tokens[-1]), 1)
        left = tokens.size - 1 - self.window
        if self.window >= 0 and left >= self.start:
            self._add(int(tokens[left]), -1)

    def pop(self, tokens: I32) -> None:
        """The last of `tokens` is about to be taken back."""
        self._add(int(tokens[-1]), -1)
        left = tokens.size - 1 - self.window
        if self.window >= 0 and left >= self.start:
            self._add(int(tokens[left]), 1)

    def fork(self) -> Counts:
        twin = object.__new__(Counts)
        twin.start, twin.window = self.start, self.window
        twin._slots, twin._ids, twin._counts = dict(self._slots), self._ids.copy(), self._counts.copy()
        return twin

    def _add(self, token: int, amount: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot >= self._ids.size:
                self._ids = _grown(self._ids)
                self._counts = _grown(self._counts)
            self._ids[slot], self._counts[slot] = token, 0
        self._counts[slot] += amount


class History:
    """The prompt and the accepted output, and the counts that the penalties in force need."""

    def __init__(self, params: ResolvedParams, prompt_ids: Sequence[int]) -> None:
        self._tokens: I32 | None = None
        self._size, self.num_prompt = 0, len(prompt_ids)
        self._fresh = list(prompt_ids)  # not yet in the array: most requests never need it
        window, scope = params.penalty_window, params.penalty_scope
        self.repeated = self.frequent = None
        if params.repetition_penalty != 1:
            start = self.num_prompt if scope == "output" else 0
            self.repeated = Counts(self.tokens, start, window)
        if params.frequency_penalty or params.presence_penalty:
            start = 0 if scope == "all" else self.num_prompt
            shared = self.repeated is not None and self.repeated.start == start
            self.frequent = self.repeated if shared else Counts(self.tokens, start, window)

    @property
    def tokens(self) -> I32:
        if self._tokens is None:
            self._tokens = np.zeros(0, np.int32)
        if self._fresh:
            size = self._size + len(self._fresh)
            while size > self._tokens.size:
                self._tokens = _grown(self._tokens)
            self._tokens[self._size : size] = self._fresh
            self._size = size
            self._fresh.clear()
        return self._tokens[: self._size]

    @property
    def num_output(self) -> int:
        return self._size + len(self._fresh) - self.num_prompt

    def push(self, token: int) -> None:
        self._fresh.append(token)
        if self.repeated is not None or self.frequent is not None:
            for counts in self._all_counts():
                counts.push(self.tokens)

    def rewind(self, num_output: int) -> None:
        all_counts = self._all_counts()
        while self.num_output > num_output:
            if self._fresh and not all_counts:
                self._fresh.pop()
                continue
            tokens = self.tokens
            for counts in all_counts:
                counts.pop(tokens)
            self._size -= 1

    def fork(self) -> History:
        twin = object.__new__(History)
        twin._tokens = None if self._tokens is None else self._tokens.copy()
        twin._size, twin.num_prompt, twin._fresh = self._size, self.num_prompt, list(self._fresh)
        twin.repeated = None if self.repeated is None else self.repeated.fork()
        shared = self.frequent is not None and self.frequent is self.repeated
        twin.frequent = twin.repeated if shared else None if self.frequent is None else self.frequent.fork()
        return twin

    def _all_counts(self) -> list[Counts]:
        if self.frequent is self.repeated:
            return [] if self.repeated is None else [self.repeated]
        return [counts for counts in (self.repeated, self.frequent) if counts is not None]


def _grown(array: I32) -> I32:
    larger = np.zeros(max(64, 2 * array.size), np.int32)
    larger[: array.size] = array
    return larger

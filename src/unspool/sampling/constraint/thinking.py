"""Answers that begin with thinking: a constraint holds for what follows it, and a budget limits it.

    start ──opening mark──► thinking ──closing mark──► closing ──► answer
      └── a first token of the answer ────────────────────────────────▲

In `opening` and `closing` the tokens are given: the rest of the opening mark, the closing mark where the budget is
spent, and what stands between it and an answer that is held to a constraint. Each accepted token leaves the state
before it in a log, so that going back is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from unspool.sampling.constraint.matcher import Matcher

if TYPE_CHECKING:
    from unspool.params.values import ThinkingMarks


class Tokenizer(Protocol):
    """The part of `unspool.text.tokenizer.Tokenizer` that is needed here."""

    vocab_size: int

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, *, add_special: bool = ..., parse_special: bool = ...) -> list[int]: ...


@dataclass(frozen=True)
class _State:
    phase: str  # start | opening | thinking | closing | answer
    used: int = 0  # tokens of thinking
    tail: bytes = b""  # the last bytes of the text, among which a mark may stand
    given: tuple[int, ...] = ()  # the tokens that must come next


class ThinkingMatcher:
    """A constraint's progress through an answer that may begin with thinking. Without a constraint (`answer` is None)
    all tokens are allowed but where the budget is spent."""

    def __init__(
        self, thinking: ThinkingMarks, budget: int | None, answer: Matcher | None, tokenizer: Tokenizer
    ) -> None:
        self._answer, self._tokenizer, self._budget = answer, tokenizer, budget
        self._opens, self._closes = thinking.opens.encode(), thinking.closes.encode()
        self._kept = max(len(self._opens), len(self._closes)) - 1  # bytes of the tail that may begin a mark
        self._first, *rest = self._encode(thinking.opens)
        self._opening = tuple(rest)
        self._written_close = self._encode(thinking.written_close or thinking.closes)
        self._before_answer = thinking.before_answer if answer is not None else ""
        self._state = self._budgeted(_State("thinking" if thinking.is_open else "start"))
        self._log: list[_State] = []
        self._num_words = (tokenizer.vocab_size + 31) // 32

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end may follow."""
        return self._state.phase == "answer" and self._answer is not None and self._answer.is_finished

    def check(self, token: int) -> bool:
        """Whether this token may come next."""
        state = self._state
        if state.given:
            return token == state.given[0]
        if self._answer is None:
            return True
        if state.phase == "thinking":
            return token not in self._tokenizer.eos_ids
        return (state.phase == "start" and token == self._first) or self._answer.check(token)

    def mask(self) -> NDArray[np.uint32] | None:
        """Bit `t % 32` of word `t // 32`: whether token t may come next; None: every one."""
        state = self._state
        if state.given:
            return _set(np.zeros(self._num_words, np.uint32), state.given[0])
        if self._answer is None:
            return None
        if state.phase == "thinking":
            mask = ~np.zeros(self._num_words, np.uint32)
            for token in self._tokenizer.eos_ids:
                mask[token // 32] &= ~np.uint32(1 << (token % 32))
            return mask
        mask = self._answer.mask()
        return _set(mask.copy(), self._first) if state.phase == "start" else mask

    def accept(self, token: int) -> None:
        """Go on with this token, which must be allowed."""
        if not self.check(token):
            raise ValueError(f"token {token} is not allowed here by the limits of thinking")
        self._log.append(self._state)
        self._state = self._after(token)

    def rollback(self, n: int) -> None:
        """Take back the last `n` tokens."""
        if not 0 <= n <= len(self._log):
            raise ValueError(f"cannot take back {n} of {len(self._log)} tokens")
        for _ in range(n):
            if self._reaches_answer(self._state) and self._answer is not None:
                self._answer.rollback(1)
            self._state = self._log.pop()

    def fork(self) -> ThinkingMatcher:
        twin = object.__new__(ThinkingMatcher)
        twin.__dict__.update(self.__dict__)
        twin._answer = None if self._answer is None else self._answer.fork()
        twin._log = list(self._log)
        return twin

    def forced(self) -> list[int]:
        """The tokens that must follow."""
        if self._state.given:
            return list(self._state.given)
        return self._answer.forced() if self._state.phase == "answer" and self._answer is not None else []

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special=False, parse_special=True)) if text else ()

    def _after(self, token: int) -> _State:
        state = self._state
        if state.phase == "answer":
            return self._answered(state, token)
        if state.given:
            rest = state.given[1:]
            if rest:
                return replace(state, given=rest)
            return self._budgeted(_State("thinking")) if state.phase == "opening" else _State("answer")
        if state.phase == "start":
            return self._started(state, token)
        tail = state.tail + self._tokenizer.token_bytes(token)
        found = tail.find(self._closes)
        if found < 0:
            return self._budgeted(replace(state, used=state.used + 1, tail=tail[-self._kept :] if self._kept else b""))
        before, more = self._before_answer, tail[found + len(self._closes) :].decode("utf-8", "replace")
        given = self._encode(before[len(more) :]) if before.startswith(more) else ()
        return _State("closing", given=given) if given else _State("answer")

    def _started(self, state: _State, token: int) -> _State:
        if self._answer is not None:
            if token != self._first or self._answer.check(token):
                return self._answered(_State("answer"), token)
            return _State("opening", given=self._opening) if self._opening else self._budgeted(_State("thinking"))
        tail = (state.tail + self._tokenizer.token_bytes(token)).lstrip()
        if tail.startswith(self._opens):
            return self._budgeted(_State("thinking"))
        return replace(state, tail=tail) if self._opens.startswith(tail) else _State("answer")

    def _answered(self, state: _State, token: int) -> _State:
        if self._answer is not None:
            self._answer.accept(token)
        return replace(state, used=state.used + 1)

    @staticmethod
    def _reaches_answer(state: _State) -> bool:
        """Whether the constraint has followed the token that led here."""
        return state.phase == "answer" and state.used > 0

    def _budgeted(self, state: _State) -> _State:
        """The closing mark must come where the budget is spent."""
        if state.phase != "thinking" or self._budget is None or state.used < self._budget:
            return state
        return _State("closing", given=self._written_close)


def _set(mask: NDArray[np.uint32], token: int) -> NDArray[np.uint32]:
    mask[token // 32] |= np.uint32(1 << (token % 32))
    return mask

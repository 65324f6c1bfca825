"""A constraint's progress through one answer.

    root ──deep_copy──► walker: follows the tokens, goes back, says what is forced
                          └──deep_copy──► masker: follows too, says what is allowed; dropped on every way back

Two, because llguidance keeps its last mask by the parser's row number and lexer state, and does not forget it when
tokens are taken back: another text that reaches the same row would be given the old mask. The walker never computes
one, so its copies are clean. Following costs under a microsecond a token, a copy some tens.

Copies share the lexer's lazily built states, so a schema's second request is faster than its first; but they also share
its limits. A failure is therefore tried again on a lexer of its own, with the answer's tokens replayed: whether a
request fails never depends on what others did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unspool.errors import RequestError
from unspool.sampling.constraint.vocabulary import Vocabulary


class Matcher:
    """Which tokens may come next. End tokens may exactly where the constraint is satisfied.

    Where the grammar leaves one text only, the one token that the tokenizer writes there is allowed (where no longer
    token could be meant): `{"name":` is not spelled letter by letter. `check` and `mask` always agree.
    """

    def __init__(self, root: Any, rebuild: Callable[[], Any], vocabulary: Vocabulary, param: str) -> None:
        """`root` has followed nothing; `rebuild` makes another that shares nothing with it."""
        self._walker = root.deep_copy()
        self._masker: Any = None
        self._rebuild = rebuild
        self._own = False  # whether the lexer is shared with nobody but this request's forks
        self._vocabulary = vocabulary
        self._param = param
        self._tokens: list[int] = []
        self._num_ends = 0  # end tokens accepted; llguidance never sees them
        self._buffer = np.zeros(vocabulary.num_words, np.uint32)

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self._num_ends > 0 or self._tried(self._walker_accepts)

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end may follow."""
        return self._num_ends > 0 or self._tried(lambda: self._walker.is_stopped() and self._walker_accepts())

    def check(self, token: int) -> bool:
        """Whether this token may come next."""
        if token in self._vocabulary.end_ids:
            return self.is_accepting
        if self.is_finished or not 0 <= token < self._vocabulary.size or not self._is_text(token):
            return False
        forced = self._forced_token()
        if forced is not None:
            return token == forced
        return bool(self._tried(lambda: self._walker.validate_tokens([token]) == 1))

    def mask(self) -> NDArray[np.uint32]:
        """Bit `t % 32` of word `t // 32`: whether token t may come next. The array is reused by the next call."""
        if self.is_finished:
            np.copyto(self._buffer, self._vocabulary.ends)
            return self._buffer
        forced = self._forced_token()
        if forced is not None:
            self._buffer.fill(0)
            self._buffer[forced // 32] = np.uint32(1 << (forced % 32))
            return self._buffer
        self._tried(self._compute)
        np.bitwise_and(self._buffer, self._vocabulary.text, out=self._buffer)
        return self._buffer

    def accept(self, token: int) -> None:
        """Go on with this token, which must be allowed."""
        if token in self._vocabulary.end_ids:
            if not self.is_accepting:
                raise ValueError(f"token {token} ends the answer before the constraint is satisfied")
            self._num_ends += 1
            return
        if not self.check(token):
            raise ValueError(f"token {token} is not allowed here by the constraint")
        self._tried(lambda: self._walker.consume_token(token))
        if self._masker is not None and not self._masker.consume_token(token):
            self._masker = None
        self._tokens.append(token)

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        if not 0 <= count <= len(self._tokens) + self._num_ends:
            raise ValueError(f"cannot take back {count} of {len(self._tokens) + self._num_ends} tokens")
        ends = min(count, self._num_ends)
        self._num_ends -= ends
        count -= ends
        if count:
            del self._tokens[len(self._tokens) - count :]
            self._masker = None
            if not self._walker.rollback(count):
                self._replay()

    def fork(self) -> Matcher:
        """Another that stands where this one stands; the two go on independently."""
        twin = object.__new__(Matcher)
        twin.__dict__.update(self.__dict__)
        twin._walker = self._walker.deep_copy()
        twin._masker = None
        twin._tokens = list(self._tokens)
        twin._buffer = np.zeros_like(self._buffer)
        return twin

    def forced(self) -> list[int]:
        """The tokens that must follow: at each of these steps `mask` allows that one token and no end.

        So decoding step by step, under any other parameters, gives these very tokens; a list made by cutting the whole
        forced text at once might not, because how a tokenizer cuts depends on what follows.
        """
        tokens: list[int] = []
        while not self.is_finished and (token := self._forced_token()) is not None:
            self._tried(lambda token=token: self._walker.consume_token(token))  # type: ignore[misc]
            tokens.append(token)
            self._tokens.append(token)
        if tokens:
            del self._tokens[-len(tokens) :]
            if not self._walker.rollback(len(tokens)):
                self._replay()
        return tokens

    def _is_text(self, token: int) -> bool:
        return bool(self._vocabulary.text[token // 32] >> np.uint32(token % 32) & 1)

    def _walker_accepts(self) -> bool:
        return bool(self._walker.is_accepting()) and not self._walker.is_error()

    def _forced_token(self) -> int | None:
        tokens = self._walker.compute_ff_tokens()
        return tokens[0] if tokens else None

    def _compute(self) -> bool:
        if self._masker is None:
            self._masker = self._walker.deep_copy()
        self._masker.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        return self._failure() is None

    def _tried(self, step: Callable[[], bool]) -> bool:
        """`step`; where it fails for a limit's sake, once more on a lexer of our own."""
        if step():
            return True
        if self._failure() is None:
            return False
        if not self._own:
            self._replay()
            if step():
                return True
        reason = self._failure()
        if reason is None:
            return False
        raise RequestError(
            f"the constraint cannot be followed after {len(self._tokens):,} tokens: {reason}",
            self._param,
            "constraint_failed",
        )

    def _failure(self) -> str | None:
        """Why nothing can follow; None if something can, or if the answer is whole. llguidance calls all of these
        stopped, and its mask then says "end": an answer that breaks off would pass for a whole one."""
        for native in (self._walker, self._masker):
            if native is not None and native.is_stopped() and (native.is_error() or not native.is_accepting()):
                return short_reason(native.get_error())
        return None

    def _replay(self) -> None:
        self._walker, self._masker, self._own = self._rebuild(), None, True
        self._walker.consume_tokens(self._tokens)


def short_reason(reason: str) -> str:
    """The first line of llguidance's message, without its marks."""
    first = reason.split("<non-verbose/>")[0].strip().split("\n")[0]
    return "no text can follow" if first in ("", "NoExtensionBias") else first

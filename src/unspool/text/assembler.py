"""From tokens to text that is safe to show, with each token paired with its text.

    token ─► detokenizer ─► banned strings ─► stop strings ─► text
               half a character  may still become      may still become
               is held           a banned string       a stop string

A token is sent with the text that completes it. A stop string cuts the text, and tokens entirely after the cut are
dropped. A banned string is reported with the token in which it starts (or, if that was already shown, the first token
that was not), so that the engine can rewind there and choose another token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unspool.events import Token
from unspool.text.detokenizer import Detokenizer
from unspool.text.stop import StopMatcher, automaton
from unspool.text.tokenizer import Tokenizer


class Stop(NamedTuple):
    """A stop string was found; the text ends before it, or with it."""

    text: str


class Banned(NamedTuple):
    """A banned string was found; nothing of it was shown."""

    text: str
    start: int  # the output token that it starts in


# The result for one token: text to show, the tokens that it completes, and a match. It is a bare tuple, and requests
# without strings to match have a simpler assembler, because this runs for every token: with the code for stop strings,
# `unspool bench host --text` takes 60% longer.
Piece = tuple[str, tuple[Token, ...], Stop | Banned | None]


class Assembler:
    """No text, for a model without a tokenizer: each token goes out at once."""

    def push(self, token: Token, show: bool = True) -> Piece:
        """Add one token; without `show` (a stop token) it has no text."""
        return "", (token,), None

    def flush(self) -> Piece:
        """The end: returns everything held, unless it completes a stop."""
        return "", (), None

    def rewind(self, num_tokens: int) -> None:
        """Drop the tokens after the first `num_tokens`, none of which was shown."""
        raise AssertionError("only a banned string is gone back from, and nobody looks for one here")

    @property
    def held(self) -> str:
        """Text that is held because it may still become a stop or a banned string."""
        return ""


class TextAssembler(Assembler):
    """The common case without strings to match: text is safe to show as soon as its characters are complete."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids=prompt_ids, skip_special=skip_special)
        self._held: list[Token] = []  # tokens whose text was not sent yet

    def push(self, token: Token, show: bool = True) -> Piece:
        text = self._detokenizer.push(token.id) if show else ""
        if text and not self._held:
            return text, (token,), None
        self._held.append(token)
        return text, self._release() if text else (), None

    def flush(self) -> Piece:
        return self._detokenizer.flush(), self._release(), None

    def _release(self) -> tuple[Token, ...]:
        tokens = tuple(self._held)
        self._held.clear()
        return tokens


class MatchingAssembler(Assembler):
    """Looks for stop strings and banned strings, and holds back what may still become one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        banned: Sequence[str] = (),
        skip_special: bool = True,
    ) -> None:
        self._tokenizer, self._include_stop, self._prompt_ids = tokenizer, include_stop, prompt_ids
        self._skip_special = skip_special
        self._stops = automaton(tuple(stops)) if stops else None
        self._banned = automaton(tuple(banned)) if banned else None
        self._emitted = 0  # characters shown
        self._given = 0  # tokens shown
        self._reset()

    def _reset(self) -> None:
        self._detokenizer = Detokenizer(self._tokenizer, skip_special=self._skip_special, prompt_ids=self._prompt_ids)
        self._stop_matcher = StopMatcher(self._stops, include=self._include_stop) if self._stops else None
        self._banned_matcher = StopMatcher(self._banned) if self._banned else None
        self._decoded = 0  # characters that the detokenizer gave
        self._starts: list[int] = []  # where each token's text starts
        self._tokens: list[Token] = []
        self._passed = 0  # characters that passed the matchers

    def push(self, token: Token, show: bool = True) -> Piece:
        return self._filter(self._advance(token, show))

    def flush(self) -> Piece:
        text, tokens, match = self._filter(self._detokenizer.flush())
        if match is not None:
            return text, tokens, match
        held = self._banned_matcher.flush() if self._banned_matcher is not None else ""
        if self._stop_matcher is not None:
            held, stop = self._stop_matcher.push(held)
            if stop is not None:
                more, rest, match = self._cut(held, stop)
                return text + more, tokens + rest, match
            held += self._stop_matcher.flush()
        more, rest, _ = self._show(held)
        last = tuple(self._tokens[self._given :])
        self._given = len(self._tokens)
        return text + more, tokens + rest + last, None

    def rewind(self, num_tokens: int) -> None:
        """Drop the tokens after the first `num_tokens`, none of which was shown. Text that was shown is not shown
        again, although the matchers, restarted, may hold its end as a possible beginning of a match."""
        kept = self._tokens[:num_tokens]
        emitted, given = self._emitted, self._given
        self._reset()
        self._emitted, self._given = emitted, given
        for token in kept:
            self._filter(self._advance(token, show=True))

    @property
    def held(self) -> str:
        return "".join(one.held_text for one in (self._stop_matcher, self._banned_matcher) if one is not None)

    def _advance(self, token: Token, show: bool) -> str:
        text = self._detokenizer.push(token.id) if show else ""
        self._starts.append(self._decoded)
        self._tokens.append(token)
        self._decoded += len(text)
        return text

    def _filter(self, text: str) -> Piece:
        if self._banned_matcher is not None:
            before = self._decoded - len(text) - self._banned_matcher.held
            text, matched = self._banned_matcher.push(text)
            if matched is not None:
                return "", (), Banned(matched, max(self._given, self._token_at(before + len(text))))
        if self._stop_matcher is not None:
            text, matched = self._stop_matcher.push(text)
            if matched is not None:
                return self._cut(text, matched)
        return self._show(text)

    def _show(self, text: str) -> Piece:
        fresh, first = self._fresh(text), self._given
        if fresh:
            ends = [*self._starts[first + 1 :], self._decoded]
            while self._given < len(self._tokens) and ends[self._given - first] <= self._emitted:
                self._given += 1
        return fresh, tuple(self._tokens[first : self._given]), None

    def _cut(self, text: str, matched: str) -> Piece:
        fresh, first = self._fresh(text), self._given
        while self._given < len(self._tokens) and self._starts[self._given] < self._emitted:
            self._given += 1
        return fresh, tuple(self._tokens[first : self._given]), Stop(matched)

    def _fresh(self, text: str) -> str:
        """The part of matched text that was not already shown before a rewind."""
        fresh = text[max(0, self._emitted - self._passed) :]
        self._passed += len(text)
        self._emitted += len(fresh)
        return fresh

    def _token_at(self, offset: int) -> int:
        """The token whose text contains the character at `offset`."""
        index = len(self._starts) - 1
        while index > 0 and self._starts[index] > offset:
            index -= 1
        return index

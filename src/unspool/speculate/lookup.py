"""Prompt lookup: what followed the last time the text ended like this?

A suffix automaton of the request's tokens knows, after every token, the longest suffix that occurred before and where
that occurrence ended: it is the suffix link of the last state. Adding a token costs amortised constant time, so a
proposal costs microseconds however long the text is. The longer that suffix, the surer the guess; every guess that is
right makes it longer by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from unspool.drafter import BaseDrafter, Draft, DraftContext

SHORTEST = 2  # a single repeated token says little about the next one
LENGTHS = (3, 4, 5, 7, 10, 15, 25, 50)  # of suffixes: where the next confidence begins


class SuffixAutomaton:
    """All substrings of a growing sequence. State s stands for substrings up to length[s] that end at first_end[s]."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._first_end = [-1]
        self._last = 0
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        nexts, link, length, first_end = self._next, self._link, self._length, self._first_end
        current = len(nexts)
        nexts.append({})
        length.append(length[self._last] + 1)
        first_end.append(len(self.tokens))
        link.append(0)
        self.tokens.append(token)
        state = self._last
        while state != -1 and token not in nexts[state]:
            nexts[state][token] = current
            state = link[state]
        if state != -1:
            target = nexts[state][token]
            link[current] = target if length[target] == length[state] + 1 else self._split(state, target, token)
        self._last = current

    def _split(self, state: int, target: int, token: int) -> int:
        """A state of its own for the shorter substrings that now end in one more place than `target`'s longest."""
        nexts, link = self._next, self._link
        clone = len(nexts)
        nexts.append(dict(nexts[target]))
        self._length.append(self._length[state] + 1)
        self._first_end.append(self._first_end[target])
        link.append(link[target])
        link[target] = clone
        while state != -1 and nexts[state].get(token) == target:
            nexts[state][token] = clone
            state = link[state]
        return clone

    def repeated_suffix(self) -> tuple[int, int]:
        """(length of the longest suffix that occurred before, where that first occurrence ended)"""
        state = self._link[self._last]
        return (0, -1) if state <= 0 else (self._length[state], self._first_end[state])

    def following(self, count: int) -> Draft:
        """What came next where the longest repeated suffix first ended; past the text's end, what was said here."""
        length, end = self.repeated_suffix()
        if length < SHORTEST:
            return Draft()
        tokens = self.tokens[end + 1 : end + 1 + count]
        while len(tokens) < count:  # so that a short period is repeated
            tokens += tokens[: count - len(tokens)]
        return Draft(tokens, [bisect_right(LENGTHS, length + place) for place in range(len(tokens))])


class Lookup(BaseDrafter):
    name = "lookup"
    priors = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)  # by confidence: how often a guess is right

    def __init__(self) -> None:
        self._automata: dict[int, SuffixAutomaton] = {}

    def propose(self, contexts: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        return [self._caught_up(context).following(count) for context, count in zip(contexts, counts, strict=True)]

    def _caught_up(self, context: DraftContext) -> SuffixAutomaton:
        automaton = self._automata.get(context.number)
        if automaton is None or not _begins_with(context.tokens, automaton.tokens):
            automaton = self._automata[context.number] = SuffixAutomaton()
        for token in context.tokens[len(automaton.tokens) :]:
            automaton.push(token)
        return automaton

    def seconds(self, count: int) -> float:
        return 0.0

    def forget(self, number: int) -> None:
        self._automata.pop(number, None)


def _begins_with(tokens: Sequence[int], known: Sequence[int]) -> bool:
    """Whether what is known is still true: a rewound request is shorter, or differs in the token it went back for."""
    return len(known) <= len(tokens) and (not known or tokens[len(known) - 1] == known[-1])

"""Stop strings, exactly: nothing of a stop is ever shown, nothing else is ever held back.

    stops: "###", "\\n\\nQ"    push("Hi\\n") → "Hi", held "\\n"    push("\\nA") → "\\n\\nA"    push("###x") → "", "###"

The held text is the longest suffix that is the beginning of some stop. An Aho-Corasick automaton has that length at
every character (the depth of its state), so the cost is linear in the text for any number of stops, and does not depend
on how the text is divided into pushes.

The match that is complete first wins; of those complete at the same character, the longest. This is the only rule that
needs no lookahead: the model stops at the token that completes a stop, and the end of a text never turns held
characters into a match. So a stop inside another one is always found before it: with "b" and "abc", the text "abc"
stops at "b" and shows "a".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from unspool.errors import RequestError


class Automaton:
    """The automaton of some stop strings, shared by matchers."""

    def __init__(self, stops: Sequence[str]) -> None:
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop[{index}] must be a string that is not empty, got {stop!r}", "stop")
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]  # the state of the longest proper suffix that is a beginning of some stop
        self.depth = [0]
        self.matched = [0]  # the length of the longest stop that ends here; 0: none
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._children[state].get(character)
            if following is None:
                following = len(self._children)
                self._children[state][character] = following
                self._children.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.matched.append(0)
            state = following
        self.matched[state] = len(stop)

    def _link(self) -> None:
        """Breadth first, so that the fallback of a state is set before the states below it need it."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            if not self.matched[state]:
                self.matched[state] = self.matched[self._fallback[state]]
            for character, child in self._children[state].items():
                self._fallback[child] = self.step(self._fallback[state], character)
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        while state and character not in self._children[state]:
            state = self._fallback[state]
        return self._children[state].get(character, 0)


@lru_cache(4)
def automaton(stops: tuple[str, ...]) -> Automaton:
    """The automaton of some stops, made once for all answers to a request."""
    return Automaton(stops)


class StopMatcher:
    """Feed it an answer's text as it arrives; show only what it returns."""

    def __init__(self, stops: Sequence[str] | Automaton, include: bool = False) -> None:
        self._automaton = stops if isinstance(stops, Automaton) else automaton(tuple(stops))
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    @property
    def held(self) -> int:
        """The number of characters that are held because they may still become a stop."""
        return len(self._held)

    @property
    def held_text(self) -> str:
        return self._held

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is now safe to show, and the completed stop, if any. After a stop nothing more is returned:
        what follows it is not part of the answer."""
        if self.matched is not None:
            return "", None
        state, step, lengths = self._state, self._automaton.step, self._automaton.matched
        for position, character in enumerate(text):
            state = step(state, character)
            length = lengths[state]
            if length:
                return self._finish(self._held + text[: position + 1], length)
        self._state = state
        whole = self._held + text
        safe = len(whole) - self._automaton.depth[state]
        self._held = whole[safe:]
        return whole[:safe], None

    def _finish(self, text: str, length: int) -> tuple[str, str]:
        start = len(text) - length
        self.matched = text[start:]
        self._held = ""
        return (text if self._include else text[:start]), self.matched

    def flush(self) -> str:
        """The text ended without a stop: returns the held text."""
        held, self._held, self._state = self._held, "", 0
        return held

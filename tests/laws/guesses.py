"""A drafter for laws."""

from __future__ import annotations

import random

LONGEST = 6  # tokens in one draft


class Guesses:
    """Drafts of the right answer, often with a wrong token in it."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt, self.answer, self.rng = num_prompt, (), random.Random(3)

    def propose(self, contexts, counts):  # type: ignore[no-untyped-def]
        starts = [len(context.tokens) - self.num_prompt for context in contexts]
        pairs = zip(starts, counts, strict=True)
        return [[self.some(token) for token in self.answer[at : at + min(count, LONGEST)]] for at, count in pairs]

    def some(self, token: int) -> int:
        return token if self.rng.random() < 0.8 else self.rng.randrange(256)

    def seconds(self, count: int) -> float:
        return 0.0

    def forget(self, number: int) -> None: ...

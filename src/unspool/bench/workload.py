"""Requests as users send them: lengths of prompts and answers that vary widely, and texts for them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

WORDS = (
    "time", "house", "river", "light", "stone", "paper", "window", "garden", "letter", "morning", "winter", "bread",
    "music", "village", "storm", "mountain", "engine", "market", "doctor", "silver", "question", "answer", "table",
)  # fmt: skip


@dataclass(frozen=True)
class Mix:
    """Lengths whose logarithms are normal, as those of real requests nearly are: medians, spread, and bounds."""

    about: str
    prompt: float  # median tokens
    prompt_spread: float  # standard deviation of the logarithm
    output: float
    output_spread: float
    most: tuple[int, int] = (4096, 1024)


# Medians and spreads as in published samples of conversations (ShareGPT, LMSYS-Chat-1M), of summaries and of code.
MIXES = {
    "chat": Mix("short questions, answers of a few paragraphs", 50, 1.2, 130, 0.9, (2048, 512)),
    "summarise": Mix("long texts, short answers", 900, 0.6, 60, 0.5, (4096, 256)),
    "write": Mix("short prompts, long answers", 40, 0.7, 350, 0.5, (512, 1024)),
    "code": Mix("code before the cursor, a few lines", 400, 0.9, 25, 0.7, (4096, 128)),
    "short": Mix("for a quick look", 30, 0.5, 16, 0.4, (128, 32)),
}


@dataclass(frozen=True)
class Job:
    prompt_tokens: int
    output_tokens: int

    @property
    def prompt_words(self) -> int:
        """A word of ours is about one token in every vocabulary."""
        return self.prompt_tokens


def jobs_of(mix: str, count: int, seed: int) -> list[Job]:
    rng, shape = random.Random(f"{seed} lengths {mix}"), MIXES[mix]
    return [
        Job(
            _length(rng, shape.prompt, shape.prompt_spread, shape.most[0]),
            _length(rng, shape.output, shape.output_spread, shape.most[1]),
        )
        for _ in range(count)
    ]


def _length(rng: random.Random, median: float, spread: float, most: int) -> int:
    return max(1, min(most, round(rng.lognormvariate(math.log(median), spread))))


def words(rng: random.Random, count: int) -> str:
    """A text of its own from its first word on, so that no server finds it computed."""
    return f"{rng.randrange(10**6)} " + " ".join(rng.choices(WORDS, k=max(1, count - 1)))

"""How likely a model finds a text: perplexity, bits per byte, and every token's share, in strided windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unspool.errors import RequestError

if TYPE_CHECKING:
    from unspool.events import Token
    from unspool.llm import LLM

WINDOW = 2048  # tokens, or the model's context if that is shorter
PASS_TOKENS = 8192  # of windows that are computed together


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `end`, of which those from `first` on are scored: they have seen what is before them here."""

    start: int
    first: int
    end: int


def windows(num_tokens: int, size: int, stride: int) -> list[Window]:
    """Windows that score each token after the first exactly once. All but those of the first window have at least
    `size - stride` tokens before them."""
    if not 1 <= stride <= size - 1:
        raise RequestError(f"stride is {stride}; allowed: 1 to {size - 1}, one less than the window", "stride")
    found, scored = [], 1
    while scored < num_tokens:
        end = min(num_tokens, size if scored == 1 else scored + stride)
        found.append(Window(max(0, end - size), scored, end))
        scored = end
    return found


@dataclass(frozen=True)
class ScoredToken:
    position: int
    id: int
    text: str
    logprob: float
    rank: int | None
    nbytes: int
    top: tuple[tuple[int, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"position": self.position, "id": self.id, "text": self.text, "logprob": self.logprob,
                "rank": self.rank, "top": [{"id": id, "logprob": logprob} for id, logprob in self.top]}  # fmt: skip


@dataclass
class Score:
    """What a text came to. Its first token is predicted by nothing, so it is not counted."""

    num_tokens: int  # of the text, the first one included
    tokens: list[ScoredToken] = field(default_factory=list)

    @property
    def nll(self) -> float:
        """The sum of negative logprobs, in nats."""
        return -math.fsum(token.logprob for token in self.tokens)

    @property
    def perplexity(self) -> float | None:
        """None: nothing was scored."""
        if not self.tokens:
            return None
        mean = self.nll / len(self.tokens)
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def perplexity_error(self) -> float | None:
        """Standard error of the perplexity, as if tokens were independent."""
        count, perplexity = len(self.tokens), self.perplexity
        if count < 2 or perplexity is None:
            return None
        mean = self.nll / count
        variance = math.fsum((-token.logprob - mean) ** 2 for token in self.tokens) / (count - 1)
        return perplexity * math.sqrt(variance / count)

    @property
    def nbytes(self) -> int:
        return sum(token.nbytes for token in self.tokens)

    @property
    def bits_per_byte(self) -> float | None:
        return self.nll / math.log(2) / self.nbytes if self.nbytes else None

    def as_dict(self) -> dict[str, Any]:
        def finite(value: float | None) -> float | None:
            return value if value is not None and math.isfinite(value) else None

        return {
            "tokens": self.num_tokens,
            "scored": len(self.tokens),
            "bytes": self.nbytes,
            "nll": finite(self.nll),
            "perplexity": finite(self.perplexity),
            "perplexity_error": finite(self.perplexity_error),
            "bits_per_byte": finite(self.bits_per_byte),
        }


def score_tokens(
    llm: LLM,
    tokens: Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    top: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Score]:
    """The score so far, after each pass; the last one is of the whole text. Windows of a pass run as one batch."""
    size = window or min(WINDOW, llm.engine.context_length)
    if not 2 <= size <= llm.engine.context_length:
        raise RequestError(f"window is {size:,}; allowed: 2 to {llm.engine.context_length:,}, the context", "window")
    jobs = windows(len(tokens), size, stride or max(1, size // 2))
    score = Score(len(tokens))
    at_once = max(1, PASS_TOKENS // size)
    yield score
    for done in range(0, len(jobs), at_once):
        some = jobs[done : done + at_once]
        for job, scored in zip(some, llm.score_many([tokens[job.start : job.end] for job in some], top), strict=True):
            score.tokens += [_scored(llm, job.start + index, scored[index])
                             for index in range(job.first - job.start, job.end - job.start)]  # fmt: skip
        if progress is not None:
            progress(score.tokens[-1].position + 1, len(tokens))
        yield score


def _scored(llm: LLM, position: int, token: Token | None) -> ScoredToken:
    assert token is not None
    assert token.logprob is not None
    is_special = token.id in llm.tokenizer.special_ids
    nbytes = 0 if is_special else len(llm.tokenizer.token_bytes(token.id))
    text = llm.tokenizer.token_text(token.id)
    return ScoredToken(position, token.id, text, token.logprob, token.rank, nbytes, token.top)

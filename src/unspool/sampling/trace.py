"""Why this token: what every stage did, with the numbers needed to recompute the choice by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unspool.params.resolve import jsonable
from unspool.records import record
from unspool.sampling.draw import F32, gumbel
from unspool.sampling.filters import ranking, weights
from unspool.sampling.logprobs import entropy, rank_of, row_stats, top_ids

NUM_CANDIDATES = 32  # best scores of the draw that are reported, at least


@record(frozen=True)
class TokenEffect:
    """One token's logit before and after a stage; None if it was removed before, or by this stage."""

    token: int
    before: float | None
    after: float | None

    @property
    def alive(self) -> bool:
        return self.after is not None


@record(frozen=True)
class StageTrace:
    """What one stage did: how many tokens it left, and their probability when it began.

    A token's probability after it is exp(its logit - `log_total`).
    """

    name: str
    value: Any  # its parameter (or parameters)
    survivors: int
    mass: float
    log_total: float
    tokens: tuple[TokenEffect, ...]  # the chosen token first, then the top raw alternatives


@record(frozen=True)
class Candidate:
    """A survivor in the draw: score = logit + gumbel, both float32; the best score is chosen."""

    token: int
    logit: float
    gumbel: float  # 0 when greedy
    score: float


@record(frozen=True)
class StepTrace:
    """One step: the model's view of the chosen token, then every stage that was on, then the draw."""

    position: int
    token: int
    raw_probability: float
    raw_rank: int  # 1 is the likeliest
    entropy_bits: float  # of the raw distribution
    alternatives: tuple[tuple[int, float], ...]  # top raw tokens and their probabilities, then the requested ones
    stages: tuple[StageTrace, ...]
    greedy: bool
    seed: int
    candidates: tuple[Candidate, ...]  # best score first: the chosen token, the runner-up, …

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        entry: dict[str, Any] = jsonable(self)
        return entry


@record(frozen=True)
class Recorded:
    """A stage's input and output rows, kept until the choice is known."""

    name: str
    value: Any
    before: F32
    after: F32


def step_trace(
    raw: F32,
    recorded: list[Recorded],
    final: F32,
    token: int,
    position: int,
    *,
    seed: int,
    greedy: bool,
    top: int,
    also: Sequence[int] = (),
) -> StepTrace:
    """The trace of a choice. It follows the `top` likeliest tokens and those in `also`."""
    stats = row_stats(raw)
    best = top_ids(raw, top)
    best += [other for other in dict.fromkeys(also) if other not in best]
    followed = [token, *(other for other in best if other != token)]
    return StepTrace(
        position=position,
        token=token,
        raw_probability=math.exp(stats.logprob(raw[token])),
        raw_rank=rank_of(raw, token),
        entropy_bits=entropy(raw) / math.log(2),
        alternatives=tuple((other, math.exp(stats.logprob(raw[other]))) for other in best),
        stages=tuple(_stage_trace(step, followed) for step in recorded),
        greedy=greedy,
        seed=seed,
        candidates=_candidates(final, position, seed, greedy, max(top, NUM_CANDIDATES)),
    )


def _stage_trace(step: Recorded, followed: list[int]) -> StageTrace:
    alive = step.after > -np.inf
    weight = weights(step.before)
    return StageTrace(
        name=step.name,
        value=step.value,
        survivors=int(np.count_nonzero(alive)),
        mass=int(weight[alive].sum()) / max(1, int(weight.sum())),
        log_total=-row_stats(step.after).logprob(0.0),
        tokens=tuple(TokenEffect(token, _alive(step.before[token]), _alive(step.after[token])) for token in followed),
    )


def _alive(logit: np.float32) -> float | None:
    return float(logit) if logit > -np.inf else None


def _candidates(final: F32, position: int, seed: int, greedy: bool, count: int) -> tuple[Candidate, ...]:
    survivors = np.flatnonzero(final > -np.inf)
    noise = np.zeros(survivors.size, np.float32) if greedy else gumbel(seed, position, survivors)
    scores = final[survivors] + noise
    order = ranking(scores)[:count]
    return tuple(
        Candidate(int(survivors[i]), float(final[survivors[i]]), float(noise[i]), float(scores[i])) for i in order
    )

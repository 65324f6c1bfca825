"""Beam search: keep the `width` likeliest prefixes, collect those that end, stop when no other can beat them.

The rules are transformers' (so are the answers): of each step's candidates the first `width` that end are hypotheses,
the best `width` that do not end go on. A hypothesis is worth the sum of its logprobs over its length to the power of
`length_penalty`. The search is over when

    early_stopping True      there are `width` hypotheses; all that end in the same step compete for those places
    early_stopping False     the best running beam, scored at its present length, is no better than the worst of them
    early_stopping "never"   likewise, but scored at the greatest length when that favours it (length_penalty > 0)

or when the length is reached. Pure Python over (token, logprob) pairs: the engine brings those and does the forking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unspool.params import BeamParams
from unspool.records import record


@record(frozen=True, slots=True)
class Hypothesis:
    """Output tokens that ended, by an end token or (`is_cut`) by the length, and their score."""

    tokens: tuple[int, ...]
    score: float
    logprobs: tuple[float, ...]
    is_cut: bool


@record(frozen=True, slots=True)
class Beam:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.logprobs)


@record(frozen=True, slots=True)
class Step:
    """A running beam of the next step: the place of the beam it continues, and by which token."""

    parent: int
    token: int


class BeamSearch:
    def __init__(
        self, params: BeamParams, *, max_output: int, num_end_ids: int, ends: Callable[[tuple[int, ...]], bool]
    ) -> None:
        self.params, self.max_output, self._ends = params, max_output, ends
        self.num_candidates = max(2, 1 + num_end_ids) * params.width
        self.beams = [Beam((), ())]
        self.hypotheses: list[Hypothesis] = []  # best first, at most `width`
        self.is_done = False

    def advance(self, continuations: Sequence[Sequence[tuple[int, float]]]) -> list[Step]:
        """For each running beam its `num_candidates` best (token, logprob); the beams that go on, best first."""
        candidates = sorted(
            (-(beam.total + logprob), place, token, logprob)
            for place, (beam, pairs) in enumerate(zip(self.beams, continuations, strict=True))
            for token, logprob in pairs
        )[: self.num_candidates]
        running: list[tuple[Step, Beam]] = []
        for rank, (_, place, token, logprob) in enumerate(candidates):
            parent = self.beams[place]
            beam = Beam((*parent.tokens, token), (*parent.logprobs, logprob))
            is_cut = len(beam.tokens) >= self.max_output
            if is_cut or self._ends(beam.tokens):
                if rank < self.params.width:
                    self._collect(beam, is_cut and not self._ends(beam.tokens))
            elif len(running) < self.params.width:
                running.append((Step(place, token), beam))
        self.beams = [beam for _, beam in running]
        self.is_done = not running or not self._can_improve()
        return [step for step, _ in running]

    def _collect(self, beam: Beam, is_cut: bool) -> None:
        score = beam.total / len(beam.tokens) ** self.params.length_penalty
        self.hypotheses.append(Hypothesis(beam.tokens, score, beam.logprobs, is_cut))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of equals the earlier stays
        del self.hypotheses[self.params.width :]

    def _can_improve(self) -> bool:
        if len(self.hypotheses) < self.params.width:
            return True
        if self.params.early_stopping is True:
            return False
        length = len(self.beams[0].tokens)
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.max_output
        return self.beams[0].total / length**self.params.length_penalty > self.hypotheses[-1].score

    def best(self, count: int) -> list[Hypothesis]:
        """The n best: hypotheses, then, if the search was cut short, running beams as they stand."""
        penalty = self.params.length_penalty
        open_beams = [
            Hypothesis(beam.tokens, beam.total / max(1, len(beam.tokens)) ** penalty, beam.logprobs, True)
            for beam in self.beams
        ]
        return [*self.hypotheses, *open_beams][:count]

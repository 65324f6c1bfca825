"""Beam search inside the engine: beams are requests that share blocks by reference.

Each beam is planned like any other request. When its logits are computed, it submits its best continuations and pauses.
When all beams of the group have submitted theirs, the search selects: a beam with several selected continuations is
forked, one with none is dropped. No text is sent before the search is over, because any beam may still lose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unspool.engine.branch import Branch, Clock
from unspool.engine.group import Group
from unspool.engine.outcome import Ending, Failure, Generation, Outcome, Survivor
from unspool.events import Event, Finished, FinishReason, Text, Token, Usage
from unspool.lazy import np
from unspool.sampling.beam import BeamSearch, Hypothesis
from unspool.text.assembler import Assembler, Stop

if TYPE_CHECKING:
    from unspool.engine.output import StepOutput
    from unspool.engine.request import Request


class BeamGroup(Group):
    """A request decoded by beam search: `beams` run, and `offers` collects their continuations."""

    search: BeamSearch
    make_assembler: Callable[[], Assembler]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.has_forked = True  # there are no siblings to start: the search forks as it goes
        self.offers: dict[int, list[tuple[int, float]]] = {}
        self.clock = Clock(self.arrived)  # of the first beam, which all others share
        self.num_cached: int | None = None  # prompt tokens that the prefix cache gave; None: not looked up yet

    def advance(self, branch: Branch, output: StepOutput, row: int, now: float) -> Outcome:
        """Submit a beam's best continuations and wait for the other beams. The last beam of a round selects."""
        self.clock.tick(now)
        if self.num_cached is None:  # only the first beam looked the prompt up; others are forks of it
            self.num_cached = branch.request.num_cached
        if self.search.max_output == 0:
            return [], "", (), Generation(is_last=True)
        try:
            self._offer(branch, output, row)
        except Exception as error:
            return [], "", (), Failure(error)
        return [], "", (), self._decide() if len(self.offers) == len(self.branches) else None

    def _offer(self, branch: Branch, output: StepOutput, row: int) -> None:
        from unspool.sampling.logprobs import top_ids

        (logits,) = output.rows(row, 1)
        scores = branch.sampler.scores(logits, len(branch.request.tokens) - branch.request.num_pending)
        best = top_ids(scores, self.search.num_candidates)
        self.offers[branch.request.number] = [
            (token, float(scores[token])) for token in best if np.isfinite(scores[token])
        ]
        branch.request.is_paused = True

    def _decide(self) -> Generation:
        steps = self.search.advance([self.offers[branch.request.number] for branch in self.branches])
        self.offers = {}
        num_children = [0] * len(self.branches)
        for step in steps:
            num_children[step.parent] += 1
        survivors = []
        for step in steps:
            num_children[step.parent] -= 1  # the last child takes the parent's place
            survivors.append(Survivor(self.branches[step.parent], step.token, num_children[step.parent] > 0))
        parents = {step.parent for step in steps}
        dropped = tuple(branch for place, branch in enumerate(self.branches) if place not in parents)
        return Generation(tuple(survivors), dropped, self.search.is_done)

    def fork(self, parent: Branch, request: Request) -> Branch:
        """A new beam with the same tokens as another one."""
        return Branch(
            request=request,
            choice=0,
            params=parent.params,
            sampler=parent.sampler.fork(),
            assembler=Assembler(),
            clock=self.clock,
            end_ids=parent.end_ids,
            max_output=parent.max_output,
            output=list(parent.output),
        )

    def results(self, reason: FinishReason | None, now: float) -> Sequence[Event]:
        """The n best as events; `reason` when the search was ended from outside."""
        found = self.search.best(self.params.n)
        found += [Hypothesis((), float("-inf"), (), True)] * (self.params.n - len(found))
        events: list[Event] = []
        for choice, hypothesis in enumerate(found):
            text, tokens, ending = self._text(hypothesis)
            if reason is not None:
                ending = Ending(reason)
            events.append(Text(self.id, choice, text, tokens))
            events.append(
                Finished(
                    request=self.id,
                    choice=choice,
                    reason=ending.reason,
                    usage=Usage(len(self.prompt), len(tokens), self.num_cached or 0),
                    timings=self.clock.timings(now, len(tokens)),
                    work=self.clock.work(),
                    stop=ending.stop,
                    seed=self.params.seed,
                    prompt_logprobs=tuple(self.prompt_logprobs) if choice == 0 else (),
                    beam_score=hypothesis.score,
                )
            )
        return events

    def _text(self, hypothesis: Hypothesis) -> tuple[str, tuple[Token, ...], Ending]:
        """A hypothesis as text, cut at a stop string as a stream of it would have been."""
        wants = self.params.logprobs is not None
        logprobs: Sequence[float | None] = hypothesis.logprobs if wants else [None] * len(hypothesis.tokens)
        tokens = [Token(token, logprob) for token, logprob in zip(hypothesis.tokens, logprobs, strict=True)]
        last = hypothesis.tokens[-1] if hypothesis.tokens else None
        ending = Ending("length") if hypothesis.is_cut else Ending("eos", last)
        if last in self.params.stop_token_ids and not hypothesis.is_cut:
            ending = Ending("stop", last)
        assembler = self.make_assembler()
        text = ""
        given: list[Token] = []
        for token in tokens:
            more, whole, match = assembler.push(token)
            text += more
            given += whole
            if isinstance(match, Stop):
                return text, tuple(given), Ending("stop", match.text)
        more, whole, _ = assembler.flush()
        return text + more, (*given, *whole), ending

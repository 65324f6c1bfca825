"""Beam search inside the engine: beams are requests that share blocks by reference.

Each beam is planned like any other request. When its logits come it hands in its best continuations and pauses; when
all beams of the group have, the search decides: a beam that several continuations come from is forked, one that none
comes from is dropped. Nothing is told before the search is over, since any beam may still lose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unspool.engine.branch import Branch, Ending
from unspool.engine.group import Group
from unspool.events import Event, Finished, FinishReason, Text, Token, Usage
from unspool.lazy import np
from unspool.sampling.beam import BeamSearch, Hypothesis
from unspool.text.assembler import Assembler, Piece, PlainAssembler

if TYPE_CHECKING:
    from unspool.engine.request import Request
    from unspool.engine.scheduler import Scheduler
    from unspool.ops.step import Row


class BeamGroup(Group):
    """A request that is searched: `beams` run, their continuations gather in `offers`."""

    search: BeamSearch
    make_assembler: Callable[[], Assembler | PlainAssembler | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.has_forked = True  # there are no siblings to start: the search forks as it goes
        self.offers: dict[int, list[tuple[int, float]]] = {}

    def offer(self, branch: Branch, row: Row) -> None:
        """A beam's logits came: note its best continuations and let it wait for the others."""
        from unspool.sampling.logprobs import top_ids

        scores = branch.sampler.scores(row, len(branch.request.tokens))
        best = top_ids(scores, self.search.num_candidates)
        self.offers[branch.request.number] = [
            (token, float(scores[token])) for token in best if np.isfinite(scores[token])
        ]
        branch.request.is_paused = True

    @property
    def is_complete(self) -> bool:
        return 0 < len(self.offers) == len(self.branches)  # none is left once the search is over

    def advance(
        self, scheduler: Scheduler, new_request: Callable[[Request], Request]
    ) -> tuple[list[Branch], list[Branch]]:
        """Decide the step: the beams that begin, and those that are dropped."""
        steps = self.search.advance([self.offers[branch.request.number] for branch in self.branches])
        self.offers = {}
        beams, begun = [], []
        heirs: dict[int, int] = {}  # parent's place: how many continue it
        for step in steps:
            heirs[step.parent] = heirs.get(step.parent, 0) + 1
        for step in steps:
            parent = self.branches[step.parent]
            heirs[step.parent] -= 1
            if heirs[step.parent] == 0:  # the last heir takes the parent's place
                beams.append((parent, step.token))
                continue
            child = Branch(
                request=new_request(parent.request),
                choice=0,
                params=parent.params,
                sampler=parent.sampler.fork(),
                assembler=None,
                clock=parent.clock,
                end_ids=parent.end_ids,
                max_output=parent.max_output,
                output=list(parent.output),
            )
            child.request.tokens.append(step.token)
            scheduler.fork(parent.request, child.request)
            begun.append(child)
            beams.append((child, step.token))
        dropped = [branch for place, branch in enumerate(self.branches) if place not in heirs]
        for branch, token in beams:
            if branch not in begun:
                branch.request.tokens.append(token)
                branch.request.is_paused = False
            branch.output.append(token)
            branch.sampler.accept(token)
        self.branches = [branch for branch, _ in beams]
        return begun, dropped

    def results(self, reason: FinishReason | None, timings: Callable[[int], object]) -> Sequence[Event]:
        """The n best as events; `reason` when the search was ended from outside."""
        found = self.search.best(self.params.n)
        found += [Hypothesis((), float("-inf"), (), True)] * (self.params.n - len(found))
        events: list[Event] = []
        for choice, hypothesis in enumerate(found):
            piece, ending = self._text(hypothesis)
            if reason is not None:
                ending = Ending(reason)
            events.append(Text(self.id, choice, piece.text, piece.tokens))
            events.append(
                Finished(
                    request=self.id,
                    choice=choice,
                    reason=ending.reason,
                    usage=Usage(len(self.prompt), len(piece.tokens), self.num_cached or 0),
                    timings=timings(len(piece.tokens)),  # type: ignore[arg-type]
                    stop=ending.stop,
                    seed=self.params.seed,
                    details={"score": hypothesis.score},
                )
            )
        return events

    num_cached: int | None = None  # prompt tokens that the prefix cache gave; None: not looked up yet

    def _text(self, hypothesis: Hypothesis) -> tuple[Piece, Ending]:
        """A hypothesis as text, cut at a stop string as a stream of it would have been."""
        wants = self.params.logprobs is not None
        logprobs: Sequence[float | None] = hypothesis.logprobs if wants else [None] * len(hypothesis.tokens)
        tokens = [Token(token, logprob) for token, logprob in zip(hypothesis.tokens, logprobs, strict=True)]
        last = hypothesis.tokens[-1] if hypothesis.tokens else None
        ending = Ending("length") if hypothesis.is_cut else Ending("eos", last)
        if last in self.params.stop_token_ids and not hypothesis.is_cut:
            ending = Ending("stop", last)
        assembler = self.make_assembler()
        if assembler is None:
            return Piece("", tuple(tokens)), ending
        text = ""
        given: list[Token] = []
        for token in tokens:
            piece = assembler.push(token)
            text += piece.text
            given += piece.tokens
            if piece.stop is not None:
                return Piece(text, tuple(given)), Ending("stop", piece.stop)
        piece = assembler.flush()
        return Piece(text + piece.text, (*given, *piece.tokens)), ending

"""Running ahead: while the device computes a step, the host plans the next one and reads the one before.

    device   | step 1 | step 2 | step 3 | …
    host       plan 2 · read 1   plan 3 · read 2   …

A sampled token feeds the next step on the device. The host plans with a placeholder for it, which is all that planning
needs, and learns the token one step later. If that token ended its answer, what the device went on to compute for it is
void and nobody is told. Order on the device is order of launching, so a block that is freed and given to another is
written by its new owner last.

A request that needs the host to choose (a constraint, a trace, an order of stages of its own, …) makes the engine step
plainly while it runs. A draft is checked by the device but read at once, since the next plan depends on it; while no
draft is likely to pay, the engine runs ahead and drafters only look on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from unspool.errors import SamplingError
from unspool.events import Token
from unspool.plan import PENDING, Plan
from unspool.sampling.pipeline import Choice, why_none

if TYPE_CHECKING:
    from unspool.engine.branch import Branch
    from unspool.engine.engine import Engine
    from unspool.engine.runner import Runner
    from unspool.ops import Launched

@dataclass(frozen=True, slots=True)
class InFlight:
    plan: Plan
    launched: Launched
    is_ahead: bool  # counted as done, with placeholders; else it has drafts, and its outcome decides
    begun: float


class Ahead:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._runner = engine.runner
        self._last: InFlight | None = None
        self._read: float | None = None  # when the last step was read, if it was run ahead of

    def step(self) -> None:
        engine = self._engine
        is_ahead = not self._wants_drafts()
        on_device = self._device_can_draw(is_ahead)
        if not (on_device and is_ahead):
            self.settle()
        if not on_device:
            engine.step_plainly()
            return
        begun = engine.speculation.now()
        if not is_ahead:
            engine.draft()
        plan = engine.scheduler.plan()
        last, self._last = self._last, None
        if plan:
            try:
                self._last = self._launch(plan, is_ahead, begun)
            except Exception as error:
                engine.fail_all(plan, error)
        if last is not None:
            self._settle(last)
        if self._last is not None and not (is_ahead and plan):
            self.settle()

    def settle(self) -> None:
        """Read what is in the air, so that every token is known."""
        last, self._last = self._last, None
        if last is not None:
            self._settle(last)

    def _device_can_draw(self, is_ahead: bool) -> bool:
        branches = self._engine.branches.values()
        return all(branch.on_device and (is_ahead or not branch.draws_in_turn) for _, branch in branches)

    def _wants_drafts(self) -> bool:
        engine = self._engine
        if not engine.speculation.drafters:
            return False
        running = [request for request in engine.scheduler.running if not request.is_paused]
        rows = sum(min(request.num_left, engine.config.chunk_tokens) for request in running)
        return engine.speculation.is_due([engine.branches[r.number][1] for r in running], max(1, rows))

    # Launching ------------------------------------------------------------------------------------------------------
    def _launch(self, plan: Plan, is_ahead: bool, begun: float) -> InFlight:
        engine = self._engine
        engine.mark_started(plan)
        launched = self._runner.launch(plan)
        if is_ahead:  # a draft's outcome is not guessed: it is read before planning
            engine.scheduler.commit_ahead(plan, PENDING)
        return InFlight(plan, launched, is_ahead, begun)

    # Reading --------------------------------------------------------------------------------------------------------
    def _settle(self, last: InFlight) -> None:
        engine = self._engine
        try:
            tokens = last.launched.tokens()
        except Exception as error:
            engine.fail_all(last.plan, error)
            return
        self._time(last)
        chosen: dict[int, list[int]] = {}
        after: list[Callable[[], None]] = []
        now = engine.speculation.now()
        branches, settle = engine.branches, engine.scheduler.settle
        next_draw = 0
        for work in last.plan.works:
            request, first, rows, _, _, num_samples = work
            draw, next_draw = next_draw, next_draw + num_samples
            if not num_samples or request not in branches:
                continue
            group, branch = branches[request]
            position = first + len(rows) - num_samples + 1
            if not group.has_forked:
                engine.note_first(group, branch, after)
            if last.is_ahead and branch.speculate is None and tokens[draw] >= 0:
                if branch.is_told:
                    logprob, top, rank = last.launched.logprobs(draw, branch.params.logprobs or 0)
                    token = Token(tokens[draw], logprob, top, rank=rank)
                    engine.take_in(group, branch, token, now, after)
                else:
                    engine.take_plainly(group, branch, tokens[draw], now, after)
                settle(branch.request, position, tokens[draw])
                continue
            choices = _checked(tokens[draw : draw + num_samples], position, draw, branch, last.launched)
            try:
                chosen[request] = engine.accept(group, branch, work, choices, after)
            except SamplingError as error:  # one request's failure is its own
                after.append(partial(engine.fail, group, branch, error))
                continue
            if last.is_ahead:
                settle(branch.request, position, chosen[request][0])
        if not last.is_ahead:
            engine.scheduler.commit(last.plan, chosen)
        for act in after:
            act()

    def _time(self, last: InFlight) -> None:
        """Tell speculation what a step takes: one that was waited for, or from reading one to reading the next."""
        speculation = self._engine.speculation
        if speculation.drafters:
            now = speculation.now()
            if not last.is_ahead:
                speculation.observe(last.plan, now - last.begun)
            elif self._read is not None:
                speculation.observe(last.plan, now - self._read, is_ahead=True)
            self._read = now if last.is_ahead else None


def _checked(tokens: Sequence[int], first: int, draw: int, branch: Branch, launched: Launched) -> Iterator[Choice]:
    """The device's tokens as choices; one that it could not choose says why."""
    for index, token in enumerate(tokens):
        if token < 0:
            raise SamplingError(why_none(token, first + index))
        logprob: float = math.nan
        top: tuple[tuple[int, float], ...] = ()
        rank: int | None = None
        if branch.is_told:
            logprob, top, rank = launched.logprobs(draw + index, branch.params.logprobs or 0)
        yield Choice(token, logprob, rank, top)


def on_device(runner: Runner, branch: Branch) -> bool:
    """Whether a branch's tokens can be chosen by the device alone."""
    params = branch.params
    return (
        params.beam is None
        and params.constraint is None
        and params.thinking_budget is None
        and not params.bad_words
        and params.prompt_logprobs is None
        and not params.trace
        and branch.max_output > 0
        and runner.can_draw(params)
    )

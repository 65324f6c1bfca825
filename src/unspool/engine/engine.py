"""The engine: requests in, events out, one step at a time. Everything else drives it through `add`, `step`, `abort`.

A step is planned, launched and read. Where the device chooses the tokens, the loop may launch a step before it has read
the last one, so that the host works while the device does:

    device   | step 1 | step 2 | step 3 | …
    host       plan 2 · read 1   plan 3 · read 2   …

A sampled token feeds the next step on the device. The host plans with a placeholder for it, which is all that planning
needs, and learns the token one step later. If that token ended its answer, what the device computed for it afterwards
is discarded. The device runs steps in launch order, so a block that is freed and reused is written last by its new
owner.

A step is read at once where the next plan needs its tokens: while a request runs whose tokens the host chooses (a
constraint, a trace, an order of stages of its own, …), and for drafts, whose outcome decides what is computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from unspool.config import EngineConfig
from unspool.engine.active import ActiveRequests
from unspool.engine.beams import BeamGroup
from unspool.engine.building import GroupBuilder, seed_output
from unspool.engine.output import DeviceOutput, HostOutput, StepOutput
from unspool.engine.request import Pooling
from unspool.engine.runner import make_runner
from unspool.engine.scheduler import Scheduler
from unspool.engine.sizing import FittedCache, fit_cache
from unspool.engine.steps import StepMeter
from unspool.errors import EngineClosedError, QueueFullError, RequestError
from unspool.events import Event, FinishReason
from unspool.models.costs import costs_of
from unspool.models.registry import build
from unspool.params import ResolvedParams, SamplingParams
from unspool.plan import Plan
from unspool.results import Receipt
from unspool.speculate.speculation import Speculation
from unspool.version import VERSION

if TYPE_CHECKING:
    from unspool.cache.states import States
    from unspool.drafter import BaseDrafter
    from unspool.engine.branch import Branch
    from unspool.models.checkpoint import Checkpoint
    from unspool.ops import Ops
    from unspool.text.tokenizer import Tokenizer


class InFlight(NamedTuple):
    """A step that was launched and not read."""

    plan: Plan
    output: StepOutput
    launched: float
    is_ahead: bool  # the next one may be launched before it is read


class Engine:
    """Runs one model. Not thread-safe: its owner calls it from one thread (see Driver)."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | Callable[[], Tokenizer] | None = None,
        ops: Ops | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """`on_progress` is called with the loaded share of the weights, and the model is ready when this returns.
        Without it, the first step finishes loading."""
        from unspool import ops as backends

        config = config or EngineConfig()
        self.ops = ops or backends.load(config)
        config = config.with_device_defaults(self.ops.name)
        self.checkpoint = checkpoint = _as_configured(checkpoint, config)
        model = build(checkpoint.config, checkpoint.weights, self.ops, None if self.ops.loads_late else on_progress)
        cache = fit_cache(model, config, config.context_of(checkpoint.config.context_length))
        self.config = replace(config, kv_tokens=cache.num_blocks[0] * config.block_size)
        self.context_length = cache.context_length
        self.runner = make_runner(
            model, self.config, cache.num_blocks, cache.num_states, keeps_hidden=self._reads_hidden()
        )
        # Another core may still be packing weights, so other slow work is done now.
        self.tokenizer = tokenizer() if callable(tokenizer) else tokenizer
        self.scheduler = _make_scheduler(config, cache)
        self.speculation = Speculation(self._drafters(), self.runner, self.scheduler.tables.groups, clock)
        self.end_ids = _end_ids(checkpoint, self.tokenizer)
        self._notes = (*checkpoint.notes, *(self.tokenizer.notes if self.tokenizer else ()))
        self._overrides = tuple(str(each) for each in checkpoint.overrides)
        self._builder = GroupBuilder(
            checkpoint, self.config, self.runner, self.speculation, self.tokenizer, self.context_length, self.end_ids
        )
        self.steps = StepMeter(costs_of(checkpoint, self.config, self.ops.name))
        self.active = ActiveRequests(self.scheduler, self.runner, self.speculation, self._builder, self.steps, clock)
        self._in_flight: deque[InFlight] = deque()
        self._now, self._last_read = clock, 0.0
        self._is_closed = False
        if on_progress is not None:
            self.ops.finish_loading(on_progress)
            on_progress(1.0)

    def _reads_hidden(self) -> bool:
        """Whether the drafter reads the model's hidden rows."""
        if self.config.speculate != "mtp":
            return False
        from unspool.engine.drafters import check_head

        check_head(self.checkpoint, self.ops)
        return True

    def _drafters(self) -> dict[str, BaseDrafter]:
        if self.config.speculate is None:
            return {}
        from unspool.engine.drafters import make_drafters

        return make_drafters(self)

    # Coming in ------------------------------------------------------------------------------------------------------
    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        output: Sequence[int] = (),
        is_chat: bool = False,
        pooling: Pooling | None = None,
    ) -> str:
        """Queue a prompt; its events come from `step` under the id that this returns.

        `output` holds the first tokens of the answer. They are treated as if they had been chosen, so the tokens after
        them are the same as in an answer that chose them. This rewinds an answer to any step and continues it with
        another token.

        By default the answer's text continues the prompt's text. With `is_chat` it is a separate text, so the leading
        space that a SentencePiece vocabulary adds to a text is removed.

        With `pooling` no token is chosen; `Finished.pooled` has the pooled hidden rows of the prompt.
        """
        if self._is_closed:
            raise EngineClosedError("the engine is closed")
        params = params or SamplingParams()
        resolved = params.resolve(self.checkpoint.generation, vocab_size=self.checkpoint.config.vocab_size)
        if self._notes:
            resolved = replace(resolved, warnings=(*resolved.warnings, *self._notes))
        self._builder.check(prompt, output, params)
        if self._is_full:
            raise QueueFullError(f"{self.config.max_waiting:,} requests are waiting already; try again later")
        id = id if id is not None else f"r{self._builder.next_number}"
        if id in self.active.groups:
            raise RequestError(f"a request {id!r} is running already", "id")
        group = self._builder.build(id, tuple(prompt), resolved, self._now(), is_chat, pooling)
        begun = seed_output(group, output) if output else []
        self.active.add(group)
        for branch, outcome in begun:
            self.active.apply(group, branch, outcome)
        return id

    @property
    def _is_full(self) -> bool:
        """Whether the queue is full. Requests that the next step will start do not count."""
        scheduler = self.scheduler
        starting = max(0, scheduler.max_running - len(scheduler.running))
        return len(scheduler.waiting) >= self.config.max_waiting + starting

    def params_of(self, id: str) -> ResolvedParams:
        """The parameters in force for a request that has not ended."""
        return self.active.groups[id].params

    # Stepping -------------------------------------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        return self.active.has_work

    def step(self) -> list[Event]:
        """Plan and launch one step, read the steps that are due, and return their events."""
        self.active.expire()
        on_device, is_ahead = self._next_mode()
        if not is_ahead:
            self._read(down_to=0)
            self.draft()
        plan = self.scheduler.plan()
        if plan:
            self._launch(plan, on_device, is_ahead)
        self._read(down_to=1 if plan and is_ahead else 0)
        return self.active.take_events()

    def _next_mode(self) -> tuple[bool, bool]:
        """For the next step: whether the device chooses its tokens, and whether it may stay in flight."""
        if not self.runner.can_launch or self.active.num_on_host:
            return False, False
        if not self._drafts_are_due():
            return True, True
        return self.active.num_in_turn == 0, False

    def _drafts_are_due(self) -> bool:
        return bool(self.speculation.drafters) and self.speculation.is_due(*self._drafted())

    def _drafted(self) -> tuple[list[Branch], int]:
        """Branches that may get drafts, and the number of rows of the next step without drafts."""
        running = [request for request in self.scheduler.running if not request.is_paused]
        rows = sum(min(request.num_left, self.config.chunk_tokens) for request in running)
        return [self.active.branches[request.number][1] for request in running], max(1, rows)

    def draft(self) -> None:
        """Set the drafts that this step verifies: tokens that a grammar forces, and tokens that drafters propose."""
        for request in self.scheduler.running:
            group, branch = self.active.branches[request.number]
            if group.matcher is not None and request.num_left == 1 and not isinstance(group, BeamGroup):
                room = branch.max_output - len(branch.output) - 1
                assert branch.sampler.constraint is not None
                request.draft = branch.sampler.constraint.forced()[:room]
        if self.speculation.drafters:
            self.speculation.draft(*self._drafted())

    def _launch(self, plan: Plan, on_device: bool, is_ahead: bool) -> None:
        now = self._now()
        self.active.mark_started(plan, now)
        try:
            output = DeviceOutput(self.runner.launch(plan)) if on_device else self._compute(plan)
        except Exception as error:
            self.active.fail_all(plan, error)
        else:
            self._in_flight.append(InFlight(plan, output, now, is_ahead))

    def _compute(self, plan: Plan) -> HostOutput:
        rows = self.runner.compute(plan)
        if self.speculation.watches:
            works = [work for work in plan.works if not work.num_hidden]
            branches = {number: branch for number, (_, branch) in self.active.branches.items()}
            self.speculation.watch(branches, works, rows.kept)
        return HostOutput(rows)

    def _read(self, down_to: int) -> None:
        """Read launched steps, oldest first, until no more than this many are unread."""
        while len(self._in_flight) > down_to:
            flight = self._in_flight.popleft()
            try:
                flight.output.wait()
            except Exception as error:
                self.active.fail_all(flight.plan, error)
            else:
                now = self._now()
                self._measure(flight, now)
                self._take_in(flight, now)

    def _take_in(self, flight: InFlight, now: float) -> None:
        """Apply the result of a step to each of its branches. Branches that have ended meanwhile are skipped."""
        branches, output, row, hidden = self.active.branches, flight.output, 0, 0
        commit, apply = self.scheduler.commit, self.active.apply
        for work in flight.plan.works:
            number, num_logits, num_samples = work.request, work.num_logits, work.num_samples
            row += num_logits
            if not num_samples:
                hidden += work.num_hidden
            if number not in branches:
                continue
            group, branch = branches[number]
            request = branch.request
            if request.is_scored:
                group.score(branch, work, output.rows(row - num_logits, num_logits))
            if not num_samples:
                commit(request, work, ())
                if work.num_hidden:
                    outcome = group.pool(work, output.hidden_rows(hidden - work.num_hidden, work.num_hidden))
                    apply(group, branch, outcome)
                continue
            if isinstance(group, BeamGroup):
                outcome = group.advance(branch, output, row - 1, now)
            else:
                outcome = branch.advance(output, work, row - num_samples, now)
            if branch.speculate is not None:
                self.speculation.learn(branch, outcome[0], num_samples - 1)
            commit(request, work, outcome[0])
            if not group.has_forked:
                self.active.fork_siblings(group, branch)
            apply(group, branch, outcome)

    def _measure(self, flight: InFlight, now: float) -> None:
        """Record how long a step took: from its launch, or from the reading of the step before it, to now."""
        seconds = now - max(flight.launched, self._last_read)
        self._last_read = now
        self.steps.record(
            flight.plan,
            flight.launched,
            seconds,
            is_ahead=flight.is_ahead,
            waiting=len(self.scheduler.waiting),
            blocks_free=self.scheduler.blocks.num_free,
        )
        if self.speculation.drafters and not flight.plan.num_prompt_rows:
            self.speculation.observe(flight.plan.num_tokens, seconds, is_ahead=flight.is_ahead)

    # Ending ---------------------------------------------------------------------------------------------------------
    def abort(self, id: str, reason: FinishReason = "abort") -> bool:
        """End a request now and deliver the output that it has. False: there is no such request (any more)."""
        return self.active.abort(id, reason)

    def close(self) -> list[Event]:
        """Abort every request; returns the last events."""
        self._is_closed = True
        for id in list(self.active.groups):
            self.active.abort(id)
        return self.active.take_events()

    # Looking in -----------------------------------------------------------------------------------------------------
    def copy_states(self) -> None:
        """Perform the pending copies of states now, so that every slot holds the state that it is recorded to hold."""
        if self.scheduler.states is not None:
            self.runner.copy(Plan(state_copies=self.scheduler.states.take_copies()))

    def receipt(self, seed: int) -> Receipt:
        """What an answer with this seed is a function of, besides its prompt and its parameters."""
        return Receipt(self.checkpoint.fingerprint, VERSION, self.ops.kernel_set, seed, self._overrides)

    @property
    def stats(self) -> Mapping[str, float]:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "blocks": blocks.num_blocks,
            "blocks_free": blocks.num_free,
            "blocks_cached": blocks.num_cached,
            **scheduler.tables.stats,
            "preemptions": scheduler.num_preemptions,
            **({} if scheduler.states is None else scheduler.states.stats),
            "prefix_queries": scheduler.prefix_queries,
            "prefix_hits": scheduler.prefix_hits,
        }

    @property
    def finished(self) -> Mapping[str, int]:
        """How many answers have ended, by reason."""
        return self.active.finished

    def check(self) -> None:
        """Assert that every block is accounted for and that no request is lost."""
        self.active.check()


def _as_configured(checkpoint: Checkpoint, config: EngineConfig) -> Checkpoint:
    """The checkpoint with the settings that the configuration overrides, and its weights in the configured format."""
    checkpoint = checkpoint.with_overrides(config)
    if config.quantize == "none":
        return checkpoint
    from unspool.models.quantize import loaded_as

    return loaded_as(checkpoint, config.quantize)


def _make_scheduler(config: EngineConfig, cache: FittedCache) -> Scheduler:
    blocks, *others = cache.pools()
    return Scheduler(
        blocks,
        step_tokens=config.step_tokens,
        max_running=config.max_running,
        prefix_cache=config.prefix_cache,
        chunk_tokens=config.chunk_tokens,
        states=_states(cache.num_states),
        others=others,
    )


def _states(num_slots: int) -> States | None:
    if num_slots == 0:
        return None
    from unspool.cache.states import States

    return States(num_slots)


def _end_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end an answer. A tokenizer may have tokens without an embedding row: the model can never produce
    them, so they are left out."""
    ids = frozenset(checkpoint.eos_ids) | (tokenizer.eos_ids if tokenizer else frozenset())
    return frozenset(token for token in ids if token < checkpoint.config.vocab_size)

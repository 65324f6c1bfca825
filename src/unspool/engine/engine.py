"""The engine: requests in, events out, one step at a time. Everything else drives it through `add`, `step`, `abort`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from unspool.cache.blocks import Blocks
from unspool.config import EngineConfig
from unspool.engine.ahead import Ahead
from unspool.engine.beams import BeamGroup
from unspool.engine.branch import Branch, Clock, Ending
from unspool.engine.drafters import make_drafters
from unspool.engine.group import Group
from unspool.engine.making import Maker, force
from unspool.engine.runner import make_runner
from unspool.engine.scheduler import Scheduler
from unspool.engine.sizing import num_kv_blocks
from unspool.errors import EngineClosedError, EngineError, QueueFullError, RequestError
from unspool.events import Event, Failed, Finished, FinishReason, Text, Token
from unspool.models.registry import build
from unspool.params import ResolvedParams, SamplingParams
from unspool.plan import Plan, Work
from unspool.results import Receipt
from unspool.speculate.speculation import Speculation
from unspool.text.assembler import Piece
from unspool.version import VERSION

if TYPE_CHECKING:
    from unspool.models.checkpoint import Checkpoint
    from unspool.ops import HostRows, Ops
    from unspool.sampling.pipeline import Choice
    from unspool.text.tokenizer import Tokenizer


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
    ) -> None:
        from unspool import ops as bodies

        config = config or EngineConfig()
        self.ops = ops or bodies.load(config)
        config = config.with_device_defaults(self.ops.name)
        if config.quantize != "none":
            from unspool.models.quantize import loaded_as

            checkpoint = loaded_as(checkpoint, config.quantize)
        self.checkpoint = checkpoint
        model = build(checkpoint.config, checkpoint.weights, self.ops)
        room = self.ops.kv_room(model.architecture.widths, config) if config.kv_tokens is None else None
        num_blocks = num_kv_blocks(model.architecture.storage, checkpoint.config.context_length, config, room)
        self.config = replace(config, kv_tokens=num_blocks * config.block_size)
        self.context_length = min(checkpoint.config.context_length, num_blocks * config.block_size)
        self.runner = make_runner(model, self.config, num_blocks)
        # Weights may still be being packed on another core: whatever else takes time comes now.
        self.tokenizer = tokenizer() if callable(tokenizer) else tokenizer
        self.scheduler = Scheduler(
            Blocks(num_blocks, config.block_size),
            step_tokens=config.step_tokens,
            max_running=config.max_running,
            prefix_cache=config.prefix_cache,
            chunk_tokens=config.chunk_tokens,
        )
        self.speculation = Speculation(make_drafters(self), self.runner, self.scheduler.blocks, clock)
        ends = frozenset(checkpoint.eos_ids) | (self.tokenizer.eos_ids if self.tokenizer else frozenset())
        # A tokenizer may have tokens that the model has no row for: those can end nothing.
        self.end_ids = frozenset(token for token in ends if token < checkpoint.config.vocab_size)
        self._notes = (*checkpoint.notes, *(self.tokenizer.notes if self.tokenizer else ()))
        self.finished: Counter[str] = Counter()  # by reason
        self._now = clock
        self.ahead = Ahead(self) if self.runner.can_launch else None
        self._groups: dict[str, Group] = {}
        self.branches: dict[int, tuple[Group, Branch]] = {}  # by the scheduler's number
        self._maker = Maker(self)
        self._events: list[Event] = []
        self._is_closed = False

    # Coming in ------------------------------------------------------------------------------------------------------
    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        output: Sequence[int] = (),
        is_chat: bool = False,
    ) -> str:
        """Queue a prompt; its events come from `step` under the id that this returns.

        `output` is how the answer begins: those tokens are taken as if they had been chosen, and what follows is what
        would have followed. So an answer can be rewound to any step and continued with another token.

        The text of an answer continues its prompt's. `is_chat`: it is a text of its own, so the space that a
        SentencePiece vocabulary puts in front of a text is taken off it.
        """
        if self._is_closed:
            raise EngineClosedError("the engine is closed")
        params = params or SamplingParams()
        resolved = params.resolve(self.checkpoint.generation, vocab_size=self.checkpoint.config.vocab_size)
        if self._notes:
            resolved = replace(resolved, warnings=(*resolved.warnings, *self._notes))
        self._maker.check(prompt, output, params)
        if self._is_full:
            raise QueueFullError(f"{self.config.max_waiting:,} requests are waiting already; try again later")
        id = id if id is not None else f"r{self._maker.next_number}"
        if id in self._groups:
            raise RequestError(f"a request {id!r} is running already", "id")
        group = self._maker.group(id, tuple(prompt), resolved, self._now(), is_chat)
        begun = force(group, output) if output else []
        leader = group.branches[0]
        leader.request.is_scored = resolved.prompt_logprobs is not None
        self._groups[id] = group
        self._begin(group, leader)
        self.scheduler.add(leader.request)
        for branch, piece in begun:
            self._tell(group, branch, piece)
        return id

    @property
    def _is_full(self) -> bool:
        """Whether as many wait as may. Those that the next step will start do not count."""
        scheduler = self.scheduler
        starting = max(0, scheduler.max_running - len(scheduler.running))
        return len(scheduler.waiting) >= self.config.max_waiting + starting

    def _begin(self, group: Group, branch: Branch) -> None:
        """A branch enters the scheduler: the first at once, the others when its prompt is computed."""
        branch.has_begun = True
        self.branches[branch.request.number] = (group, branch)
        if branch.on_device:
            self.runner.add_sampler(branch.request.number, branch.sampler)

    def params_of(self, id: str) -> ResolvedParams:
        """The parameters in force for a request that has not ended."""
        return self._groups[id].params

    # Stepping -------------------------------------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        return bool(self._groups or self._events)

    def step(self) -> list[Event]:
        """Compute one step of whatever is there and tell what came of it."""
        self._expire()
        if self.ahead is not None:
            self.ahead.step()
        else:
            self.step_plainly()
        events, self._events = self._events, []
        return events

    def step_plainly(self) -> None:
        """Plan, compute, choose, commit: one after the other."""
        self.draft()
        plan = self.scheduler.plan()
        if plan:
            start = self.mark_started(plan)
            try:
                logits = self.runner.run(plan)
                self.speculation.observe(plan, self._now() - start)
            except Exception as error:
                self.fail_all(plan, error)
            else:
                self._take(plan, logits)

    def draft(self) -> None:
        """Guesses that this step checks: what a grammar forces anyway, and what drafters propose."""
        for request in self.scheduler.running:
            group, branch = self.branches[request.number]
            if group.matcher is not None and request.num_left == 1 and not isinstance(group, BeamGroup):
                room = branch.max_output - len(branch.output) - 1
                assert branch.sampler.constraint is not None
                request.draft = branch.sampler.constraint.forced()[:room]
        if self.speculation.drafters:
            running = [request for request in self.scheduler.running if not request.is_paused]
            rows = sum(min(request.num_left, self.config.chunk_tokens) for request in running)
            self.speculation.draft([self.branches[request.number][1] for request in running], max(1, rows))

    def mark_started(self, plan: Plan) -> float:
        now = self._now()
        for work in plan.works:
            clock = self.branches[work.request][1].clock
            if clock.started is None:
                clock.started = now
        return now

    def _take(self, plan: Plan, logits: HostRows) -> None:
        """Choose tokens where logits came, commit them, and deal with those who begin, go back or end by it."""
        chosen: dict[int, list[int]] = {}
        after: list[Callable[[], None]] = []
        row = 0
        for work in plan.works:
            rows, row = logits[row : row + work.num_logits], row + work.num_logits
            group, branch = self.branches[work.request]
            if branch.request.is_scored:
                group.score(branch, work, rows)
            if work.num_samples:
                try:
                    chosen[work.request] = self._choose(group, branch, work, rows[-work.num_samples :], after)
                except Exception as error:  # one request's failure is its own
                    after.append(partial(self.fail, group, branch, error))
        self.scheduler.commit(plan, chosen)
        for act in after:
            act()

    def _choose(
        self, group: Group, branch: Branch, work: Work, rows: HostRows, after: list[Callable[[], None]]
    ) -> list[int]:
        """The tokens that a branch's rows of logits give: one, and one more for each drafted token that equals it."""
        self.note_first(group, branch, after)
        if branch.max_output == 0:
            after.append(partial(self._finish, group, branch, Ending("length")))
            return []
        if isinstance(group, BeamGroup):
            group.offer(branch, rows[-1])
            after.append(partial(self._advance_beams, group))
            return []
        first = len(branch.request.tokens)
        if branch.is_plain and len(rows) == 1:  # the way of most tokens, and a short one: nobody computes meanwhile
            token = branch.sampler.choose(rows[0], first).token
            self.take_plainly(group, branch, token, self._now(), after)
            return [token]
        choices = (branch.sampler.choose(row, first + index) for index, row in enumerate(rows))
        return self.accept(group, branch, work, choices, after)

    def accept(
        self, group: Group, branch: Branch, work: Work, choices: Iterable[Choice], after: list[Callable[[], None]]
    ) -> list[int]:
        """Take choices in, one after the other, as long as they equal the draft that the next one was made for."""
        tokens: list[int] = []
        now = self._now()
        wants_logprob = branch.params.logprobs is not None or group.is_ranked
        draft = work.tokens[len(work.tokens) - work.num_samples + 1 :]
        for index, choice in enumerate(choices):
            tokens.append(choice.token)
            logprob = choice.logprob if wants_logprob else None
            token = Token(choice.token, logprob, choice.top, choice.trace, choice.rank if wants_logprob else None)
            goes_on = self.take_in(group, branch, token, now, after)
            if not goes_on or (index < len(draft) and draft[index] != choice.token):
                break
        if branch.speculate is not None:
            self.speculation.learn(branch, tokens)
        return tokens

    def take_plainly(self, group: Group, branch: Branch, id: int, now: float, after: list[Callable[[], None]]) -> None:
        """One more token of which nothing is asked but its text."""
        piece = branch.advance_plainly(id)
        if piece is None:
            self.take_in(group, branch, Token(id), now, after)
            return
        branch.sampler.accept(id)
        branch.clock.tick(now)
        if piece[1]:
            self._events.append(Text(group.id, branch.choice, *piece))

    def take_in(self, group: Group, branch: Branch, token: Token, now: float, after: list[Callable[[], None]]) -> bool:
        """One more token of an answer; whether it goes on after it."""
        branch.sampler.accept(token.id)
        branch.clock.tick(now)
        piece, ending = branch.advance(token)
        if piece.banned is not None:
            after.append(partial(self._go_back, branch, piece.banned_at))
            return False
        self._tell(group, branch, piece)
        if ending is not None:
            after.append(partial(self._finish, group, branch, ending))
            return False
        return True

    def note_first(self, group: Group, branch: Branch, after: list[Callable[[], None]]) -> None:
        """The prompt is computed: the other branches start on its blocks, once the step is committed."""
        if not group.has_forked:
            after.append(partial(self._fork_siblings, group, branch))

    def _fork_siblings(self, group: Group, leader: Branch) -> None:
        group.has_forked = True
        for branch in group.branches[1:]:
            self._begin(group, branch)
            branch.clock.started = leader.clock.started
            self.scheduler.fork(leader.request, branch.request)

    def _advance_beams(self, group: BeamGroup) -> None:
        """When all beams of a search have handed in their continuations: decide, fork, drop, or end."""
        if not group.is_complete:
            return
        clock = group.branches[0].clock
        clock.tick(self._now())
        if group.num_cached is None:  # only the first beam looked the prompt up; others are forks of it
            group.num_cached = group.branches[0].request.num_cached
        begun, dropped = group.advance(self.scheduler, self._maker.request_like)
        for branch in begun:
            self._begin(group, branch)
        for branch in dropped:
            self._drop(branch)
        if group.search.is_done:
            self._end_search(group)

    def _end_search(self, group: BeamGroup, reason: FinishReason | None = None) -> None:
        clock = group.branches[0].clock if group.branches else Clock(group.arrived)
        for branch in group.branches:
            self._drop(branch)
        del self._groups[group.id]
        events = group.results(reason, lambda num_tokens: clock.timings(self._now(), num_tokens))
        self.finished.update(event.reason for event in events if isinstance(event, Finished))
        self._events += events

    def _drop(self, branch: Branch) -> None:
        self.speculation.forget(branch)
        self.runner.remove_sampler(branch.request.number)
        del self.branches[branch.request.number]
        self.scheduler.remove(branch.request)

    def _go_back(self, branch: Branch, index: int) -> None:
        """Undo a banned string: the token it started in may not stand at that place."""
        token = branch.output[index]
        branch.rewind(index)
        branch.sampler.ban(token)
        self.scheduler.rewind(branch.request, branch.request.num_prompt + index)

    # Telling and ending ---------------------------------------------------------------------------------------------
    def _tell(self, group: Group, branch: Branch, piece: Piece) -> None:
        if piece.text or piece.tokens:
            event = Text(group.id, branch.choice, piece.text, piece.tokens)
            if group.is_ranked:
                self._events += group.deliver(event)
            else:
                self._events.append(event)

    def _finish(self, group: Group, branch: Branch, ending: Ending) -> None:
        tally = self.speculation.tally(branch)
        if tally is not None:
            branch.details["speculation"] = tally.as_dict()
        event = Finished(
            request=group.id,
            choice=branch.choice,
            reason=ending.reason,
            usage=branch.usage(),
            timings=branch.clock.timings(self._now(), branch.num_given),
            stop=ending.stop,
            seed=branch.sampler.seed,
            details=branch.details,
        )
        self._end(group, branch, event, ending.reason)

    def fail(self, group: Group, branch: Branch, error: Exception) -> None:
        """One branch fails alone; before the branches part, they fail together."""
        if isinstance(group, BeamGroup):
            self._fail_search(group, error)
            return
        for each in [branch] if group.has_forked else group.branches:
            self._end(group, each, Failed(group.id, each.choice, error), "error")

    def _fail_search(self, group: BeamGroup, error: Exception) -> None:
        if group.id in self._groups:  # else another of its beams failed in the same step
            for beam in group.branches:
                self._drop(beam)
            del self._groups[group.id]
            self.finished["error"] += group.params.n
            self._events += [Failed(group.id, choice, error) for choice in range(group.params.n)]

    def _end(self, group: Group, branch: Branch, event: Event, reason: str) -> None:
        branch.has_ended = True
        if branch.has_begun:
            self._drop(branch)
        self.finished[reason] += 1
        self._events += group.deliver(event)
        if group.is_done:
            del self._groups[group.id]

    def fail_all(self, plan: Plan, error: Exception) -> None:
        """The step itself failed: everyone in it is told."""
        failure = EngineError(f"the step failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        for work in plan.works:
            if work.request in self.branches:
                self.fail(*self.branches[work.request], failure)

    def abort(self, id: str, reason: FinishReason = "abort") -> bool:
        """End a request now, from outside; what it has goes out. False: there is no such request (any more)."""
        group = self._groups.get(id)
        if group is None:
            return False
        if isinstance(group, BeamGroup):
            self._end_search(group, reason)
            return True
        for branch in group.branches:
            if not branch.has_ended:
                self._tell(group, branch, branch.flush())
                self._finish(group, branch, Ending(reason))
        return True

    def _expire(self) -> None:
        now = self._now()
        late = [group.id for group in self._groups.values() if group.deadline is not None and now >= group.deadline]
        for id in late:
            self.abort(id, "deadline")

    def close(self) -> list[Event]:
        """Abort everything; the events are the last."""
        self._is_closed = True
        for id in list(self._groups):
            self.abort(id)
        events, self._events = self._events, []
        return events

    def receipt(self, seed: int) -> Receipt:
        """What an answer with this seed is a function of, besides its prompt and its parameters."""
        return Receipt(self.checkpoint.fingerprint, VERSION, self.ops.kernel_set, seed)

    # Looking in -----------------------------------------------------------------------------------------------------
    @property
    def stats(self) -> Mapping[str, float]:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "blocks": blocks.num_blocks,
            "blocks_free": blocks.num_free,
            "blocks_cached": blocks.num_cached,
            "preemptions": scheduler.num_preemptions,
            "prefix_queries": scheduler.prefix_queries,
            "prefix_hits": scheduler.prefix_hits,
        }

    def check(self) -> None:
        """Every block is accounted for, and nobody is forgotten."""
        self.scheduler.check()
        known = {request.number for request in [*self.scheduler.running, *self.scheduler.waiting]}
        assert known == set(self.branches), f"the scheduler has {known}, the engine {set(self.branches)}"

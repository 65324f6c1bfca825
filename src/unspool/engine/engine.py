"""The engine: requests in, events out, one step at a time. Everything else drives it through `add`, `step`, `abort`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.cache.blocks import Blocks, root_key
from unspool.config import EngineConfig
from unspool.engine.branch import Branch, Clock, Ending
from unspool.engine.group import Group, branch_seed
from unspool.engine.plan import Plan, Work
from unspool.engine.request import Request
from unspool.engine.runner import Runner
from unspool.engine.scheduler import Scheduler
from unspool.engine.sizing import num_kv_blocks
from unspool.errors import ContextLengthError, EngineClosedError, EngineError, QueueFullError, RequestError
from unspool.events import Event, Failed, Finished, Text, Token
from unspool.params import ResolvedParams, SamplingParams
from unspool.text.assembler import Assembler, Piece

if TYPE_CHECKING:
    from unspool.ops import Ops
    from unspool.text.tokenizer import Tokenizer
    from unspool.weights.checkpoint import Checkpoint


class Engine:
    """Runs one model. Not thread-safe: whoever owns it calls it from one thread (AsyncEngine does)."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        ops: Ops | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        from unspool import ops as bodies

        config = config or EngineConfig()
        self.ops = ops or bodies.load(config)
        self.checkpoint, self.tokenizer = checkpoint, tokenizer
        num_blocks = num_kv_blocks(checkpoint.config, config)
        self.config = replace(config, kv_tokens=num_blocks * config.block_size)
        self.context_length = min(checkpoint.config.context_length, num_blocks * config.block_size)
        self.runner = Runner(checkpoint, self.ops, self.config, num_blocks)
        self.scheduler = Scheduler(
            Blocks(num_blocks, config.block_size),
            step_tokens=config.step_tokens,
            max_running=config.max_running,
            prefix_cache=config.prefix_cache,
            chunk_tokens=config.chunk_tokens,
        )
        self.end_ids = frozenset(checkpoint.eos_ids) | (tokenizer.eos_ids if tokenizer else frozenset())
        self.finished: Counter[str] = Counter()  # by reason
        self._now = clock
        self._groups: dict[str, Group] = {}
        self._branches: dict[int, tuple[Group, Branch]] = {}  # by the scheduler's number
        self._next_number = 0
        self._events: list[Event] = []
        self._is_closed = False

    # Coming in ------------------------------------------------------------------------------------------------------
    def add(self, prompt: Sequence[int], params: SamplingParams | None = None, *, id: str | None = None) -> str:
        """Queue a prompt; its events come from `step` under the id that this returns."""
        if self._is_closed:
            raise EngineClosedError("the engine is closed")
        params = params or SamplingParams()
        resolved = params.resolve(self.checkpoint.generation, vocab_size=self.checkpoint.config.vocab_size)
        self._check_prompt(prompt)
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            raise QueueFullError(f"{self.config.max_waiting:,} requests are waiting already; try again later")
        id = id if id is not None else f"r{self._next_number}"
        if id in self._groups:
            raise RequestError(f"a request {id!r} is running already", "id")
        group = Group(id, tuple(prompt), resolved, arrived=self._now())
        branch = self._make_branch(group, 0, self._compile(resolved))
        if resolved.prompt_logprobs is not None:
            branch.request.is_scored = True
        self._groups[id] = group
        self.scheduler.add(branch.request)
        return id

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        vocab_size = self.checkpoint.config.vocab_size
        if not prompt:
            raise RequestError("the prompt has no tokens; give at least one", "prompt")
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise RequestError(f"the prompt has token {token}; the vocabulary has {vocab_size:,}", "prompt")
        if len(prompt) >= self.context_length:
            holds = f"the model holds {self.checkpoint.config.context_length:,}"
            if self.context_length < self.checkpoint.config.context_length:
                holds = f"the KV cache holds {self.context_length:,} (kv_tokens), {holds}"
            raise ContextLengthError(f"the prompt has {len(prompt):,} tokens; {holds} with at least one of the answer")

    def _compile(self, params: ResolvedParams) -> Any:
        if params.constraint is None:
            return None
        if self.tokenizer is None:
            raise RequestError("a constraint needs a tokenizer; this model was loaded without one", "constraint")
        from unspool.sampling.constraint import compile_constraint

        return compile_constraint(params.constraint, self.tokenizer)

    def _make_branch(self, group: Group, choice: int, matcher: Any) -> Branch:
        from unspool.sampling.pipeline import Sampler

        params, prompt = group.params, group.prompt
        root = root_key(self.checkpoint.fingerprint, self.runner.kv.layout, params.cache_salt or "")
        request = Request(self._next_number, prompt, priority=params.priority, root=root)
        self._next_number += 1
        request.arrival = group.branches[0].request.arrival if group.branches else request.number
        end_ids: frozenset[int] = frozenset() if params.ignore_eos else self.end_ids
        sampler = Sampler(
            params,
            prompt_ids=prompt,
            vocab_size=self.checkpoint.config.vocab_size,
            end_ids=self.end_ids,
            seed=branch_seed(params.seed, choice),
            constraint=matcher,
        )
        assembler = None
        if self.tokenizer is not None:
            assembler = Assembler(
                self.tokenizer, stops=params.stop, include_stop=params.include_stop_str, banned=params.bad_words
            )
        elif params.stop or params.bad_words:
            raise RequestError("stop strings need a tokenizer; this model was loaded without one", "stop")
        room = self.context_length - len(prompt)
        branch = Branch(
            request=request,
            choice=choice,
            params=params,
            sampler=sampler,
            assembler=assembler,
            clock=Clock(group.arrived),
            end_ids=end_ids,
            max_output=room if params.max_tokens is None else min(room, params.max_tokens),
        )
        group.branches.append(branch)
        self._branches[request.number] = (group, branch)
        return branch

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
        plan = self.scheduler.plan()
        if plan:
            self._mark_started(plan)
            try:
                logits = self.runner.run(plan)
            except Exception as error:
                self._fail_all(plan, error)
            else:
                self._take(plan, logits)
        events, self._events = self._events, []
        return events

    def _mark_started(self, plan: Plan) -> None:
        now = self._now()
        for work in plan.works:
            clock = self._branches[work.request][1].clock
            if clock.started is None:
                clock.started = now

    def _take(self, plan: Plan, logits: np.ndarray) -> None:
        """Choose tokens where logits came, commit them, and deal with those who begin, go back or end by it."""
        chosen: dict[int, list[int]] = {}
        after: list[Callable[[], None]] = []
        row = 0
        for work in plan.works:
            rows, row = logits[row : row + work.num_logits], row + work.num_logits
            group, branch = self._branches[work.request]
            if branch.request.is_scored:
                group.score(branch, work, rows)
            if work.num_samples:
                try:
                    chosen[work.request] = self._choose(group, branch, work, rows[-work.num_samples :], after)
                except Exception as error:  # one request's failure is its own
                    after.append(lambda group=group, branch=branch, error=error: self._fail(group, branch, error))
        self.scheduler.commit(plan, chosen)
        for act in after:
            act()

    def _choose(
        self, group: Group, branch: Branch, work: Work, rows: np.ndarray, after: list[Callable[[], None]]
    ) -> list[int]:
        """The tokens that a branch's rows of logits give: one, and one more for each drafted token that equals it."""
        if not branch.output and branch.choice == 0 and group.num_branches > 1 and len(group.branches) == 1:
            after.append(lambda: self._fork_siblings(group, branch))
        tokens: list[int] = []
        if branch.max_output == 0:
            after.append(lambda: self._finish(group, branch, Ending("length")))
            return tokens
        draft = work.tokens[len(work.tokens) - work.num_samples + 1 :]
        for index, row in enumerate(rows):
            choice = branch.sampler.choose(row, len(branch.request.tokens) + index)
            branch.sampler.accept(choice.token)
            tokens.append(choice.token)
            branch.clock.tick(self._now())
            wants_logprob = branch.params.logprobs is not None or group.is_ranked
            logprob = choice.logprob if wants_logprob else None
            piece, ending = branch.advance(Token(choice.token, logprob, choice.top, choice.trace))
            if piece.banned is not None:
                after.append(lambda at=piece.banned_at: self._go_back(branch, at))
                break
            self._tell(group, branch, piece)
            if ending is not None:
                after.append(lambda ending=ending: self._finish(group, branch, ending))
                break
            if index < len(draft) and draft[index] != choice.token:
                break
        return tokens

    def _fork_siblings(self, group: Group, leader: Branch) -> None:
        """The prompt is computed: the other branches start on its blocks."""
        for choice in range(1, group.num_branches):
            matcher = leader.sampler.constraint
            if matcher is not None:
                matcher = self._compile(group.params)
            branch = self._make_branch(group, choice, matcher)
            branch.clock.started = leader.clock.started
            self.scheduler.fork(leader.request, branch.request)

    def _go_back(self, branch: Branch, index: int) -> None:
        """Undo a banned string: the token it started in may not stand at that place."""
        token = branch.output[index]
        branch.rewind(index)
        branch.sampler.ban(branch.request.num_prompt + index, token)
        self.scheduler.rewind(branch.request, branch.request.num_prompt + index)

    # Telling and ending ---------------------------------------------------------------------------------------------
    def _tell(self, group: Group, branch: Branch, piece: Piece) -> None:
        if piece.text or piece.tokens:
            self._events += group.deliver(Text(group.id, branch.choice, piece.text, piece.tokens))

    def _finish(self, group: Group, branch: Branch, ending: Ending) -> None:
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

    def _fail(self, group: Group, branch: Branch, error: Exception) -> None:
        self._end(group, branch, Failed(group.id, branch.choice, error), "error")

    def _end(self, group: Group, branch: Branch, event: Event, reason: str) -> None:
        del self._branches[branch.request.number]
        self.scheduler.remove(branch.request)
        self.finished[reason] += 1
        self._events += group.deliver(event)
        if group.is_done:
            del self._groups[group.id]

    def _fail_all(self, plan: Plan, error: Exception) -> None:
        """The step itself failed: everyone in it is told."""
        failure = EngineError(f"the step failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        for work in plan.works:
            if work.request in self._branches:
                self._fail(*self._branches[work.request], failure)

    def abort(self, id: str, reason: str = "abort") -> bool:
        """End a request now, from outside; what it has goes out. False: there is no such request (any more)."""
        group = self._groups.get(id)
        if group is None:
            return False
        group.num_branches = len(group.branches)  # those not begun never will
        for branch in list(group.branches):
            if branch.request.number in self._branches:
                self._tell(group, branch, branch.flush())
                self._finish(group, branch, Ending(reason))  # type: ignore[arg-type]
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
        assert known == set(self._branches), f"the scheduler has {known}, the engine {set(self._branches)}"

"""Who computes what in the next step. Plain Python: it sees counts of tokens and numbers of blocks, nothing else.

There are no phases. A request has tokens left to compute; a step has a budget of tokens. It is spent in this order:

    1. running requests with one token left (and their drafts), so that no stream waits for another request's prompt
    2. running requests with more left: prompts, in chunks that fit the rest of the budget
    3. waiting requests, by priority and arrival, while their whole prompt finds room

When blocks run out, the running request whose turn is last loses its blocks and waits again; its tokens stay, so it
computes them anew. The request whose turn is first can take everyone else's blocks and fits alone, so it always
advances: no livelock, no starvation.

Planned tokens count as computed at once; the token that a step will choose is PENDING until `commit`. So the next step
can be planned before this one is read. Blocks that a step computes may be shared from the next plan on, because the
device runs steps in launch order.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unspool.cache.blocks import Blocks
from unspool.engine.request import Request
from unspool.engine.tables import Copies, Tables
from unspool.plan import PENDING, Plan, Work

if TYPE_CHECKING:
    from unspool.cache.states import Snapshot, States
    from unspool.engine.recurrent import RecurrentStates

# Of a scored prompt, and of all of them, in one step: each asks for a row of logits, for which there must be room.
SCORED_TOKENS, ALL_SCORED_TOKENS = 64, 512


class Scheduler:
    def __init__(
        self,
        blocks: Blocks,
        *,
        step_tokens: int,
        max_running: int,
        prefix_cache: bool = True,
        chunk_tokens: int | None = None,
        states: States | None = None,
        others: Sequence[Blocks] = (),
    ) -> None:
        """`states`: slots for models with recurrent layers; each running request has one. `others`: the blocks of
        further groups of layers."""
        self.blocks, self._block_size = blocks, blocks.block_size
        self.tables = Tables((blocks, *others), step_tokens)
        self.states: RecurrentStates | None = None
        if states is not None:
            from unspool.engine.recurrent import RecurrentStates

            self.states = RecurrentStates(states, blocks, keeps_snapshots=prefix_cache)
        self.step_tokens = step_tokens
        self.chunk_tokens = chunk_tokens or step_tokens  # of prompts, in a step that others stream in
        self.max_running = min(max_running, step_tokens, *([] if states is None else [states.num_slots]))
        self.prefix_cache = prefix_cache
        self.running: list[Request] = []  # in turn
        self.waiting: list[Request] = []  # in turn
        self._prefilled: list[Request] = []  # whose blocks the last plan filled, many tokens at once
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up in the prefix cache
        self.prefix_hits = 0  # of those, found

    # Coming and going -----------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        self.tables.begin(request)
        bisect.insort(self.waiting, request, key=_turn)

    def remove(self, request: Request, *, has_failed: bool = False) -> None:
        """Forget a request, finished or not, and free its blocks at once. The states of one that failed are void."""
        (self.running if request in self.running else self.waiting).remove(request)
        self._drop(request, is_good=not has_failed)

    def fork(self, parent: Request, child: Request) -> None:
        """Start `child`, whose tokens begin as `parent`'s do, on the blocks that both share."""
        common = 0
        for a, b in zip(parent.tokens, child.tokens, strict=False):
            if a != b:
                break
            common += 1
        child.num_computed = min(common, parent.num_computed, len(child.tokens) - 1)
        if not self._can_fork(parent, child):
            child.num_computed = 0
            self.add(child)  # it begins from what the cache has, like any other
            return
        if self.states is not None:
            self.states.fork(parent, child)
        self.tables.share(parent, child)
        child.num_cached = min(child.num_computed, child.num_prompt)
        child.num_registered = child.num_computed // self._block_size
        child.keys = parent.keys[: child.num_registered]
        bisect.insort(self.running, child, key=_turn)

    def _can_fork(self, parent: Request, child: Request) -> bool:
        """Whether the parent has what its fork needs to go on from the tokens that they share."""
        if self.states is None:
            return self.tables.has_window(parent, child.num_computed)
        has_slot = parent.state >= 0 and self.states.slots.num_free > 0
        return has_slot and child.num_computed == parent.num_computed

    def rewind(self, request: Request, num_tokens: int) -> None:
        """Take back the tokens after the first `num_tokens`; what was computed of them is void."""
        del request.tokens[num_tokens:]
        request.draft = []
        request.is_paused = False
        if request.num_computed >= num_tokens:
            request.num_computed = num_tokens - 1
            if self.states is not None and request.state >= 0:
                del request.keys[request.num_computed // self._block_size :]
                request.num_computed = self.states.rewind(request, request.num_computed)
        num_full = request.num_computed // self._block_size
        del request.keys[num_full:]
        request.num_registered = min(request.num_registered, num_full)
        if self.tables.has_window(request, request.num_computed):
            self.tables.keep(request, self._num_blocks(request.num_computed))
        else:
            self._preempt(request)

    # Planning -------------------------------------------------------------------------------------------------------
    def plan(self) -> Plan:
        """Decide the next step, take the blocks it needs, and count it as computed."""
        for request in self._prefilled:
            self._register(request)
        self._prefilled = []
        budget, scored = self.step_tokens, ALL_SCORED_TOKENS
        works: dict[int, Work] = {}
        copies: Copies = []
        preempted: list[int] = []
        streaming: list[Request] = []
        prompts: list[Request] = []
        plan_one = self._plan_one_in_all if self.tables.others else self._plan_one
        for request in self.running:
            if request.is_paused:
                continue
            known_left = len(request.tokens) - request.num_computed
            work = plan_one(request) if known_left == 1 and len(works) < budget else None
            if work is not None:
                works[request.number] = work
            elif known_left > 0 or request.draft:
                (streaming if known_left <= 1 else prompts).append(request)
        budget -= len(works)
        is_streamed_in = bool(works or streaming)

        def schedule(request: Request, most: int) -> int:
            nonlocal scored
            if request.is_scored:
                most = min(most, SCORED_TOKENS, scored)
            if most == 0 or (preempted and request.number in preempted):
                return 0
            if request.draft and self.states is not None and not self.states.slots.num_free:
                request.draft = []  # there would be no way back
            count = min(request.num_left, most)
            if self.tables.windowed:
                self.tables.release_passed(request)
                count = self.tables.most_tokens(request, count)
            while not self.tables.fits(request, count) and not self.tables.has_room(request, count):
                victim = self.running[-1]
                self._preempt(victim, works.pop(victim.number, None))
                preempted.append(victim.number)
                if victim is request:
                    return 0
            works[request.number] = self._plan_tokens(request, count, copies)
            scored -= count if request.is_scored else 0
            return count

        for request in streaming:
            budget -= schedule(request, budget) if budget else 0
        if is_streamed_in:
            budget = min(budget, self.chunk_tokens)
        for request in prompts:
            budget -= schedule(request, budget) if budget else 0
        while budget and not preempted and (len(self.running) < self.max_running or self._all_paused()):
            first = next((each for each in self.waiting if not each.is_paused), None)
            if first is None or not self._admit(first, copies):
                break
            budget -= schedule(first, budget)
        if self.states is not None and works:
            return Plan(tuple(works.values()), tuple(copies), self.states.take_copies())
        return Plan(tuple(works.values()), tuple(copies))

    def _admit(self, request: Request, copies: Copies) -> bool:
        """Move the first waiting request to the running ones, with what the prefix cache has of it."""
        may_share = self.prefix_cache and request.may_share
        snapshot = self._share_prefix(request) if may_share else None

        def has_room() -> bool:
            has_state = self.states is None or self.states.slots.num_free > 0
            return has_state and len(self.running) < self.max_running and self.tables.has_room_for_all(request)

        while not has_room() and self.running and self._all_paused():
            self._preempt(self.running[-1])  # they wait for a sibling, and this may be it
        if not has_room() and self.running:
            self._drop_blocks(request)
            return False
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=_turn)
        if self.states is not None:
            self._begin_states(request, snapshot, copies)
        elif may_share:
            self.tables.copy_partial(request, request.tokens[request.num_computed : -1], copies, whole=False)
        if request.num_preemptions == 0:
            self.prefix_queries += len(request.tokens)
            self.prefix_hits += request.num_computed
            request.num_cached = min(request.num_computed, request.num_prompt)
        return True

    def _all_paused(self) -> bool:
        """Whether every request waits for a sibling. A request with a PENDING token will soon end or continue."""
        return all(request.is_paused and not request.num_pending for request in self.running)

    def _begin_states(self, request: Request, snapshot: Snapshot | None, copies: Copies) -> None:
        """Begin from a snapshot, whose full blocks the request shares already; or from nothing."""
        assert self.states is not None
        if snapshot is not None and not self.tables.copy_partial(request, snapshot.rest, copies, whole=True):
            self._drop_blocks(request)
            snapshot = None
        self.states.begin(request, snapshot)

    def _share_prefix(self, request: Request) -> Snapshot | None:
        """Share the computed blocks that the request's tokens begin with; one token is left, for its logits.

        Where layers have states, as far as the longest snapshot goes, which is returned.
        """
        size = self._block_size
        request.parting = self.tables.share_prefix(request)
        snapshot = None
        if self.states is not None:
            snapshot, position = self.states.find(request, len(request.tokens) - 1, len(request.blocks))
            if snapshot is not None and not self.states.has_partial(snapshot):
                snapshot = None
            request.num_computed = position // size * size if snapshot is not None else 0
            self.tables.keep(request, request.num_computed // size)
        request.num_registered = len(request.blocks)
        return snapshot

    def _plan_one(self, request: Request) -> Work | None:
        """The most common case: one token, into a block that only this request uses.

        The shortest way to what `_plan_tokens` would plan: with it alone, `unspool bench host` takes 15% longer.
        """
        start, blocks = request.num_computed, request.blocks
        index = start // self._block_size
        if request.draft or request.pooling or index >= len(blocks) or not self.blocks.is_writable(blocks[index]):
            return None
        table, tokens = request.table, request.tokens
        if len(table) != len(blocks):
            table = self._table(request)
        work = Work(request.number, start, (tokens[-1],), table, 1, 1)
        request.num_computed = start + 1
        tokens.append(PENDING)
        request.num_pending += 1
        if len(tokens) >= request.limit:
            request.is_paused = True
        return work if self.states is None else self._with_states(request, work)

    def _plan_one_in_all(self, request: Request) -> Work | None:
        """The same where there are several groups of layers."""
        index = request.num_computed // self._block_size
        if index >= len(request.blocks) or not self.tables.are_writable(request, index):
            return None
        work = self._plan_one(request)
        return None if work is None else work._replace(others=request.other_tables)

    def _with_states(self, request: Request, work: Work) -> Work:
        assert self.states is not None
        end = work.start + len(work.tokens)
        first_draft = end - work.num_samples + 1 if work.num_samples > 1 else None
        return work._replace(state=request.state, saves=self.states.save(request, work.start, end, first_draft))

    def _table(self, request: Request) -> tuple[int, ...]:
        if len(request.table) != len(request.blocks):
            request.table = tuple(request.blocks)
            request.other_tables = tuple(map(tuple, request.others))
        return request.table

    def _plan_tokens(self, request: Request, count: int, copies: Copies) -> Work:
        start, end = request.num_computed, request.num_computed + count
        missing = self._num_blocks(end) - len(request.blocks)
        index = start // self._block_size
        if index < len(request.blocks):
            self.tables.make_writable(request, index, copies, missing)
        if missing > 0:
            self.tables.extend(request, missing)
        tokens = request.tokens[start:end]
        tokens += request.draft[: count - len(tokens)]
        num_samples = 0 if request.pooling else max(0, end - len(request.tokens) + 1)
        num_logits = count if request.is_scored else num_samples
        num_hidden = 0
        if request.pooling:
            num_hidden = count if request.pooling == "mean" else int(end == len(request.tokens))
        request.draft = []
        request.num_computed = end
        if num_samples:  # one PENDING stands for all that a draft's rows may choose
            request.tokens.append(PENDING)
            request.num_pending += 1
            request.is_paused = len(request.tokens) >= request.limit
        if count > 1:
            self._prefilled.append(request)
        table = self._table(request)
        others = request.other_tables
        work = Work(
            request.number, start, tuple(tokens), table, num_logits, num_samples, others=others, num_hidden=num_hidden
        )
        return work if self.states is None else self._with_states(request, work)

    def _preempt(self, request: Request, planned: Work | None = None) -> None:
        """Take a request's blocks; what was planned for it in this step is not computed."""
        if planned is not None and planned.num_samples:
            request.tokens.pop()
            request.num_pending -= 1
            request.is_paused = False
        self.running.remove(request)
        self._drop(request, is_good=planned is None)
        request.draft = []
        request.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, request, key=_turn)

    # Committing -----------------------------------------------------------------------------------------------------
    def commit(self, request: Request, work: Work, chosen: Sequence[int]) -> None:
        """Record that a request's work was computed and which tokens its logits gave: none, one, or one more for each
        drafted token that equals the one chosen before it. What was computed of other drafted tokens is void."""
        num_samples, num_rows = work.num_samples, len(work.tokens)
        end = work.start + num_rows
        if num_samples:
            first = end - num_samples + 1
            request.tokens[first : first + 1] = chosen
            request.num_pending -= 1
            if num_samples > 1:
                request.num_computed = first + max(1, len(chosen)) - 1
                if self.states is not None:
                    request.num_computed = self.states.settle_draft(request, end, request.num_computed)
        if num_rows > 1 or end % self._block_size == 0 or request.saves:
            self._register(request)

    def _register(self, request: Request) -> None:
        """Make the blocks that became full and computed findable. Not while their step is being planned: whoever found
        one in the same step would read it before it is written."""
        size, num_known = self.blocks.block_size, len(request.tokens) - request.num_pending
        if request.num_computed < num_known:
            num_known = request.num_computed
        if request.saves and self.states is not None:
            self.states.keep(request)
        if num_known < (request.num_registered + 1) * size or not self.prefix_cache:
            return
        self.tables.register(request, num_known)

    # Parts ----------------------------------------------------------------------------------------------------------
    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _drop(self, request: Request, *, is_good: bool) -> None:
        """Take back all that a request holds."""
        if self.states is not None:
            self.states.drop(request, is_good=is_good)
        self._drop_blocks(request)

    def _drop_blocks(self, request: Request) -> None:
        self.tables.keep(request, 0)
        request.num_computed = request.num_registered = 0

    def check(self) -> None:
        """Assert that every block is accounted for and that every request is in the right queue."""
        self.tables.check([*self.running, *self.waiting])
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_turn), "a queue is out of turn"
        for request in self.waiting:
            assert not request.blocks, f"{request} waits and holds blocks"
        if self.states is not None:
            self.states.check(self.running)
        for request in self.running:
            assert (request.state >= 0) == (self.states is not None), f"{request} has no state, or one too many"
            assert len(request.blocks) >= self._num_blocks(request.num_computed), f"{request} lacks blocks"


def _turn(request: Request) -> tuple[int, int, int]:
    return request.turn

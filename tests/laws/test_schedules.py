"""Thousands of random schedules on a fake model that reads its history from the blocks it was told to.

The fake model writes each token into the slot of its block and chooses the next token by hashing what it finds there,
so a block shared, copied, evicted, released or rewound wrongly changes an answer. Where it has several groups of
layers, it writes into the blocks of each, and reads of each as far back as the group's window. Every finished answer
must equal the one that the same request gives alone, and every block must be accounted for after every step.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from unspool.cache import blocks as blocks_module
from unspool.cache.blocks import Blocks, blocks_in_window, root_key
from unspool.cache.states import States
from unspool.engine import recurrent, tables
from unspool.engine.request import Request
from unspool.engine.scheduler import ALL_SCORED_TOKENS, SCORED_TOKENS, Scheduler
from unspool.plan import NO_BLOCK, Plan, Work

VOCABULARY = 5  # small, so that random prompts often share prefixes
Windows = tuple[int | None, ...]  # of each group of layers


def next_token(history: list[int], seed: int, windows: Windows = (None,)) -> int:
    """From what each group of layers sees of a history."""
    seen = b"|".join(bytes(history if window is None else history[-window:]) for window in windows)
    return zlib.crc32(seen + bytes([seed])) % VOCABULARY


class FakeMemory:
    """One token in each slot; what the keys and values of a real model would be."""

    def __init__(self, groups: Sequence[Blocks], num_states: int = 0) -> None:
        self.size = groups[0].block_size
        self.windows = tuple(group.window for group in groups)
        self.slots = [[[-1] * self.size for _ in range(group.num_blocks)] for group in groups]
        self.states: list[list[int]] = [[-1] * 3 for _ in range(num_states)]  # each all tokens that it has seen

    def run(self, plan: Plan, seeds: dict[int, int]) -> dict[int, list[int]]:
        """Compute a plan: the tokens that each work's logits choose, drafts verified."""
        for source, target, group in plan.copies:
            self.slots[group][target] = list(self.slots[group][source])
        for source, target in plan.state_copies:
            self.states[target] = list(self.states[source])
        chosen = {}
        for work in plan.works:
            for offset, token in enumerate(work.tokens):
                position = work.start + offset
                for slots, table in zip(self.slots, (work.blocks, *work.others), strict=True):
                    block = table[position // self.size]
                    assert block != NO_BLOCK
                    slots[block][position % self.size] = token
            if self.states:
                self.update_state(work)
            if work.num_samples:
                chosen[work.request] = self.verify(work, seeds[work.request])
        return chosen

    def update_state(self, work: Work) -> None:
        """A state that is not of the work's first tokens would stay wrong: it is not made of the blocks."""
        history = list(self.states[work.state]) if work.start else []
        assert len(history) == work.start
        saves = dict(work.saves)
        assert len({work.state, *saves.values()}) == 1 + len(work.saves), "one slot for two states"
        for offset, token in enumerate(work.tokens):
            history.append(token)
            if offset in saves:
                self.states[saves[offset]] = list(history)
        self.states[work.state] = history

    def seen_at(self, work: Work, position: int) -> list[list[int]]:
        """What each group of layers sees from a position."""
        seen = []
        for slots, table, window in zip(self.slots, (work.blocks, *work.others), self.windows, strict=True):
            first = 0 if window is None else max(0, position + 1 - window)
            assert NO_BLOCK not in table[first // self.size : position // self.size + 1], "a released block is read"
            seen.append([slots[table[p // self.size]][p % self.size] for p in range(first, position + 1)])
        return seen

    def verify(self, work: Work, seed: int) -> list[int]:
        end = work.start + len(work.tokens)
        if self.states:
            assert self.states[work.state] == self.seen_at(work, end - 1)[0]
        tokens: list[int] = []
        for position in range(end - work.num_samples, end):
            seen = b"|".join(map(bytes, self.seen_at(work, position)))
            tokens.append(zlib.crc32(seen + bytes([seed])) % VOCABULARY)
            if position + 1 < end and work.tokens[position + 1 - work.start] != tokens[-1]:
                break
        return tokens


def answer_alone(prompt: list[int], seed: int, count: int, windows: Windows = (None,)) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed, windows))
    return tokens[len(prompt) :]


class World:
    """A scheduler, its fake memory and the requests in it, driven by random events."""

    def __init__(self, rng: random.Random, *, has_states: bool = False, windows: Windows = (None,)) -> None:
        self.rng, self.windows = rng, windows
        states = States(rng.choice([1, 2, 3, 5, 12])) if has_states else None
        size = rng.choice([1, 2, 3, 4, 8])
        self.capacity = rng.choice([24, 32, 64, 160])
        self.groups = [Blocks(self.pool_size(window, size), size, window) for window in windows]
        self.scheduler = Scheduler(
            self.groups[0],
            step_tokens=rng.choice([1, 2, 5, 16, 64]),
            max_running=rng.choice([1, 2, 4, 16]),
            prefix_cache=rng.random() < 0.8,
            chunk_tokens=rng.choice([None, 1, 3]),
            states=states,
            others=self.groups[1:],
        )
        self.memory = FakeMemory(self.groups, states.num_slots if states else 0)
        self.live: dict[int, tuple[Request, int, int]] = {}  # number: (request, seed, tokens wanted)
        self.number = self.finished = 0
        self.common = [rng.randrange(VOCABULARY) for _ in range(self.capacity)]

    def pool_size(self, window: int | None, size: int) -> int:
        """Blocks for one whole context; of a window, blocks for one sequence or a few more."""
        whole = -(-self.capacity // size)
        return whole if window is None else blocks_in_window(window, size, 1) + self.rng.choice([0, 0, 3, whole])

    def arrive(self) -> None:
        length = self.rng.randrange(1, self.capacity - 6)
        shared = self.rng.randrange(length + 1)
        prompt = self.common[:shared] + [self.rng.randrange(VOCABULARY) for _ in range(length - shared)]
        salt = self.rng.choice(["", "", "tenant"])
        request = Request(self.number, prompt, priority=self.rng.choice([0, 0, 1]), root=root_key("fake", salt))
        request.turns = tuple(sorted(self.rng.sample(range(length), self.rng.randrange(min(length, 4)))))
        self.live[self.number] = (request, self.rng.randrange(3), self.rng.randrange(1, 6))
        self.number += 1
        self.scheduler.add(request)

    def fork(self) -> None:
        running = [entry for entry in self.live.values() if entry[0] in self.scheduler.running]
        if running:
            parent, _, wanted = self.rng.choice(running)
            child = Request(self.number, parent.tokens[: parent.num_prompt], priority=parent.priority, root=parent.root)
            child.arrival = parent.arrival
            self.live[self.number] = (child, self.rng.randrange(3), wanted)
            self.number += 1
            self.scheduler.fork(parent, child)

    def rewind(self) -> None:
        running = [entry[0] for entry in self.live.values() if entry[0] in self.scheduler.running]
        if running:
            request = self.rng.choice(running)
            self.scheduler.rewind(request, self.rng.randrange(request.num_prompt, len(request.tokens) + 1))

    def abort(self) -> None:
        if self.live:
            number = self.rng.choice(list(self.live))
            self.scheduler.remove(self.live.pop(number)[0])

    def draft(self) -> None:
        for request, seed, wanted in self.live.values():
            room = wanted - request.num_output - 1
            if request in self.scheduler.running and request.num_left == 1 and room > 0 and self.rng.random() < 0.3:
                guess = answer_alone(request.tokens, seed, room, self.windows)
                request.draft = [t if self.rng.random() < 0.7 else self.rng.randrange(VOCABULARY) for t in guess]

    def step(self) -> None:
        self.draft()
        plan = self.scheduler.plan()
        self.scheduler.check()
        assert plan.num_tokens <= self.scheduler.step_tokens
        assert bool(plan) == bool(self.live), "a step without work while requests are there: a livelock"
        chosen = self.memory.run(plan, {number: entry[1] for number, entry in self.live.items()})
        for work in plan.works:
            self.scheduler.commit(self.live[work.request][0], work, chosen.get(work.request, ()))
        self.scheduler.check()
        for number in chosen:
            request, seed, wanted = self.live[number]
            if request.num_output >= wanted:
                alone = answer_alone(request.tokens[: request.num_prompt], seed, wanted, self.windows)
                assert request.tokens[request.num_prompt :] == alone
                self.scheduler.remove(self.live.pop(number)[0])
                self.finished += 1

    def run(self, num_events: int) -> None:
        events = [self.arrive, self.arrive, self.fork, self.rewind, self.abort] + [self.step] * 8
        for _ in range(num_events):
            self.rng.choice(events)()
        self.drain()

    def drain(self) -> None:
        """Everyone is served, whatever happened before, and nothing is left behind."""
        for _ in range(20_000):
            if not self.live:
                break
            self.step()
        assert not self.live, "starved"
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        self.scheduler.tables.check([])
        if self.scheduler.states is not None:
            self.scheduler.states.check([])


def run_worlds(chunk: int, *, least_hits: int, **options: Any) -> None:
    """Run 150 schedules, which together must do something."""
    finished = preempted = hits = 0
    for seed in range(chunk * 150, chunk * 150 + 150):
        world = World(random.Random(seed), **options)
        world.run(60)
        finished += world.finished
        preempted += world.scheduler.num_preemptions
        hits += world.scheduler.prefix_hits
    assert finished > 500
    assert preempted > 20
    assert hits > least_hits


@pytest.mark.parametrize("chunk", range(8))
def test_states_of_recurrent_layers_follow_their_requests(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared, forked, rewound, drafted for, preempted: the state is that of the request's own tokens."""
    monkeypatch.setattr(recurrent, "MIN_INTERVAL", 5)
    run_worlds(chunk, has_states=True, least_hits=300)


@pytest.mark.parametrize("chunk", range(8))
def test_every_answer_in_a_crowd_equals_the_one_alone(chunk: int) -> None:
    run_worlds(chunk, least_hits=500)


@pytest.mark.parametrize("windows", [(5,), (None, 7), (None, 9, 2), (12, 1)], ids=str)
@pytest.mark.parametrize("chunk", range(2))
def test_released_blocks_change_no_answer(chunk: int, windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pools for the windows of one sequence or a few, and contexts many times as long."""
    monkeypatch.setattr(blocks_module, "KEY_TILE", random.Random(chunk).choice([1, 4]))
    for module in (blocks_module, tables):
        monkeypatch.setattr(module, "REWIND", 2)
    run_worlds(chunk, windows=windows, least_hits=100)


def test_scored_prompts_share_a_limit_of_logits() -> None:
    """However many come at once; others go on beside them, and all of them are served."""
    scheduler = Scheduler(Blocks(4000, 16), step_tokens=8192, max_running=256)
    for number in range(40):
        request = Request(number, [1] * 150)
        request.is_scored = number != 20
        scheduler.add(request)
    scored = 0
    while any(request.num_left for request in scheduler.running) or scheduler.waiting:
        plan = scheduler.plan()
        assert plan, "a livelock"
        wanted = {work.request: work.num_logits for work in plan.works if work.request != 20}
        assert sum(wanted.values()) <= ALL_SCORED_TOKENS
        assert max(wanted.values(), default=0) <= SCORED_TOKENS
        assert scored or any(work.request == 20 and len(work.tokens) == 150 for work in plan.works)
        scored += sum(wanted.values())
        requests = {request.number: request for request in scheduler.running}
        for work in plan.works:
            scheduler.commit(requests[work.request], work, ())
        for request in [request for request in scheduler.running if not request.num_left]:
            scheduler.remove(request)
    assert scored == 39 * 150

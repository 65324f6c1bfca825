"""A crowd: random requests sent at random times into an engine with random, small limits."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.events import Failed, Finished, Text
from unspool.models.checkpoint import Checkpoint
from unspool.ops import Ops
from unspool.params import SamplingParams


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """Everything that must not depend on the schedule, logprobs as bits."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[bytes, ...]
    reason: str


def random_job(rng: random.Random, vocab_size: int, common: Sequence[int], longest: int) -> Job:
    length = rng.randrange(1, longest)
    shared = rng.randrange(min(length, len(common)) + 1)
    prompt = [*common[:shared], *(rng.randrange(vocab_size) for _ in range(length - shared))]
    params = SamplingParams(
        max_tokens=rng.randrange(1, 12),
        temperature=rng.choice([0, 0.7, 1.0]),
        seed=rng.randrange(1000),
        top_k=rng.choice([None, 5, 50]),
        top_p=rng.choice([None, 0.9]),
        repetition_penalty=rng.choice([None, 1.2]),
        logprobs=rng.choice([0, 3]),
        priority=rng.choice([0, 0, 1]),
        cache_salt=rng.choice([None, None, "tenant"]),
        ignore_eos=rng.random() < 0.5,
    )
    return Job(tuple(prompt), params)


class Collector:
    """Folds an engine's events into answers, and sees that each request ends exactly once."""

    def __init__(self) -> None:
        self.texts: dict[str, list[Text]] = {}
        self.ends: dict[str, Finished] = {}

    def push(self, event: Text | Finished | Failed) -> None:
        assert event.request not in self.ends, "an event after the end"
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            self.ends[event.request] = event
        else:
            self.texts.setdefault(event.request, []).append(event)

    def answer(self, id: str) -> Answer:
        texts = self.texts.get(id, [])
        tokens = [token for text in texts for token in text.tokens]
        bits = [
            struct.pack(f"<{1 + len(t.top)}d", t.logprob, *(value for _, value in t.top))
            for t in tokens
            if t.logprob is not None
        ]
        return Answer(
            tuple(token.id for token in tokens), "".join(t.text for t in texts), tuple(bits), self.ends[id].reason
        )


class Crowd:
    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str = "cpu",
        with_text: bool = True,
        ops: Ops | None = None,
        **config: object,
    ) -> None:
        tokenizer = checkpoint.tokenizer() if with_text else None
        engine = EngineConfig(device=device, **config)  # type: ignore[arg-type]
        self.engine = Engine(checkpoint, engine, tokenizer=tokenizer, ops=ops)
        self.collector = Collector()

    def step(self) -> None:
        for event in self.engine.step():
            self.collector.push(event)
        self.engine.check()

    def drain(self) -> None:
        for _ in range(100_000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        self.engine.scheduler.blocks.check()
        if self.engine.scheduler.states is not None:
            self.engine.scheduler.states.check([])

    def alone(self, job: Job) -> Answer:
        """The answer that the job gives when nothing else runs and nothing is remembered."""
        self.engine.scheduler.blocks.clear_cache()
        if self.engine.scheduler.states is not None:
            self.engine.scheduler.states.slots.clear_cache()
        id = self.engine.add(job.prompt, job.params)
        self.drain()
        return self.collector.answer(id)

    def together(self, jobs: Sequence[Job], rng: random.Random, abort_share: float = 0.0) -> list[Answer | None]:
        """All jobs, arriving in between steps in a random order; some neighbours are aborted (None)."""
        order = list(range(len(jobs)))
        rng.shuffle(order)
        ids: dict[int, str] = {}
        aborted: set[int] = set()
        for index in order:
            ids[index] = self.engine.add(jobs[index].prompt, jobs[index].params)
            for _ in range(rng.randrange(4)):
                self.step()
            if rng.random() < abort_share:
                victim = rng.choice(list(ids))
                if self.engine.abort(ids[victim]):
                    aborted.add(victim)
        self.drain()
        return [None if i in aborted else self.collector.answer(ids[i]) for i in range(len(jobs))]

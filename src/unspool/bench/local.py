"""Requests to an engine in this process, with the time of each token: what latency and throughput have in common."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unspool.bench.workload import Job
from unspool.ceilings import known_ceilings
from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.events import Finished
from unspool.models.checkpoint import open_checkpoint
from unspool.params import SamplingParams
from unspool.weights.store import resolve


@dataclass
class Sample:
    """One request: when its tokens came, in seconds after it was added."""

    job: Job
    started: float
    arrivals: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.arrivals[0]

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Bench:
    """A model, ready to be measured. Prompts are random tokens, of which no two requests share a beginning."""

    def __init__(self, options: argparse.Namespace, kv_tokens: int, *, prefix_cache: bool = False) -> None:
        from unspool.models.random import stand_in

        checkpoint = stand_in(options.random) if options.random else open_checkpoint(resolve(options.model))
        config = EngineConfig(
            device=options.device, threads=options.threads, kv_tokens=kv_tokens, prefix_cache=prefix_cache
        )
        self.name = checkpoint.name
        self.engine = Engine(checkpoint, config)
        self.costs = self.engine.steps.costs
        backend = self.engine.ops.name
        self.ceilings = None if backend == "reference" else known_ceilings(backend, options.threads)
        self._rng = random.Random(0)
        self.run([Job(8, 4)])  # what is done once is done now

    def tokens(self, count: int) -> list[int]:
        """Random ids from the middle of the vocabulary: control tokens stand at its ends."""
        size = self.engine.checkpoint.config.vocab_size
        return [self._rng.randrange(size // 4, size // 2) for _ in range(count)]

    def run(
        self, jobs: Sequence[Job], note: Callable[[int], None] | None = None, *, context: int = 0
    ) -> list[Sample]:
        """All of them at once, as far as the engine takes them; each to its end. A prompt stands behind `context`
        tokens that the prefix cache already has: they were computed before the time began."""
        prompts = [self.tokens(context + job.prompt_tokens) for job in jobs]
        if context:
            self._compute([prompt[:context] for prompt in prompts])
        samples: dict[str, Sample] = {}
        done = 0
        for job, prompt in zip(jobs, prompts, strict=True):
            params = SamplingParams(max_tokens=job.output_tokens, temperature=0, ignore_eos=True)
            id = self.engine.add(prompt, params)
            samples[id] = Sample(job, time.perf_counter())
        while self.engine.has_work:
            for event in self.engine.step():
                now = time.perf_counter()
                sample = samples[event.request]
                sample.arrivals += [now - sample.started] * len(getattr(event, "tokens", ()))
                if isinstance(event, Finished):
                    done += 1
                    if note is not None:
                        note(done)
        return list(samples.values())

    def _compute(self, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in prompts:
            self.engine.add(list(prompt), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        while self.engine.has_work:
            self.engine.step()

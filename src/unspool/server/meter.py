"""How near the steps come to what the machine's memory can give."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unspool.models.registry import architecture_of
from unspool.ops.storage import kv_bytes_per_token

if TYPE_CHECKING:
    from unspool.engine.engine import Engine
    from unspool.engine.runner import Runner
    from unspool.ops import HostRows
    from unspool.plan import Plan

MAX_STEPS = 8192  # that are remembered


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, without a single token: when and how long, what it read, and how much of which request it computed."""

    number: int
    start: float  # seconds on the engine's clock
    seconds: float
    num_bytes: int  # that it must have read
    works: tuple[tuple[int, int, int, int], ...]  # (request, first position, tokens, tokens that choose)
    waiting: int
    blocks_free: int


class Meter:
    """A runner that notes its steps: how many, how long, and how many bytes they must have read at least.

    An engine that runs ahead of its device launches steps without it: then nothing is known, and nothing is told.
    """

    def __init__(self, engine: Engine) -> None:
        self._runner: Runner = engine.runner
        self.sees_all = not engine.runner.can_launch
        weights = engine.checkpoint.weights
        looked_up = 0 if engine.checkpoint.config.tied_embeddings else weights["token_embd.weight"].nbytes
        self.step_bytes = sum(weight.nbytes for weight in weights.values()) - looked_up
        self.kv_bytes = kv_bytes_per_token(architecture_of(engine.checkpoint.config).storage, engine.config.kv_dtype)
        self.num_steps = 0
        self.seconds = 0.0
        self.num_bytes = 0.0
        self.ceiling: float | None = None  # bytes a second; None: not measured
        self.compute: float | None = None  # operations a second, likewise
        self.fastest = 0.0  # bytes a second, of any step
        self._seen = (0.0, 0.0)
        self._scheduler = engine.scheduler
        self.steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, plan: Plan) -> HostRows:
        start = time.perf_counter()
        logits = self._runner.run(plan)
        seconds = time.perf_counter() - start
        num_bytes = self.step_bytes + self.kv_bytes * sum(work.start + len(work.tokens) for work in plan.works)
        scheduler = self._scheduler
        works = tuple((work.request, work.start, len(work.tokens), work.num_samples) for work in plan.works)
        record = StepRecord(
            self.num_steps, start, seconds, int(num_bytes), works, len(scheduler.waiting), scheduler.blocks.num_free
        )
        self.steps.append(record)
        self.seconds += seconds
        self.num_steps += 1
        self.num_bytes += num_bytes
        self.fastest = max(self.fastest, num_bytes / seconds)
        return logits

    def measure(self, threads: int | None) -> None:
        """Learn the ceiling: from the file, or measured now, which takes a second and all of those threads."""
        from unspool.ceilings import ceilings

        found = ceilings("cpu", threads)
        self.ceiling, self.compute = found.bandwidth, found.compute

    def utilization(self) -> float | None:
        """Of the steps since the last look, 0 to 1; None: the ceiling is unknown.

        A ceiling that was measured among neighbours is too low: what a step has reached can be reached.
        """
        if self.ceiling is None:
            return None
        ceiling = max(self.ceiling, self.fastest)
        seconds, num_bytes = self.seconds - self._seen[0], self.num_bytes - self._seen[1]
        self._seen = (self.seconds, self.num_bytes)
        return num_bytes / seconds / ceiling if seconds > 0 else 0.0


def attach(engine: Engine) -> Meter:
    """Put a meter between an engine and its runner."""
    meter = Meter(engine)
    engine.runner = meter  # type: ignore[assignment]
    return meter

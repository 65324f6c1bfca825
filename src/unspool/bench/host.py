"""What the host does in a step, with a device that takes no time: planning, describing, reading, reporting.

    unspool bench host                         256 requests that stream token ids
    unspool bench host --text                  the same with the default model's tokenizer and its text
    unspool bench host --requests 32 --top-p 0.9 --logprobs 5

On a GPU this runs beside the device's step, so it costs nothing as long as it takes less than that. The stub device
gives every draw a token at once; what it leaves out of the GPU's own host work is the launch. Microseconds a step, over
the steps in which every request decodes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unspool.config import EngineConfig, ModelConfig
from unspool.engine.engine import Engine
from unspool.models.random import SHAPES, random_checkpoint
from unspool.ops import Batch, Draws
from unspool.ops.cuda import steps
from unspool.params import SamplingParams
from unspool.reporting import Run

BLOCK_SIZE = 128
COMMON = 2100  # tokens come from below this: texts mostly repeat what is common
# Small, since nobody computes it, but with the heads and the vocabulary of a real one.
SHAPE = replace(SHAPES["tiny"], num_heads=32, num_kv_heads=8, vocab_size=49_152, context_length=1 << 20)


class StubKV:
    layout, block_bytes, groups, state_bytes = "stub", (0,), (), 0

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def copy_block(self, source: int, target: int, group: int = 0) -> None:
        """Nothing is there."""


class StubLaunched:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def tokens(self) -> list[int]:
        return self._tokens

    def logprobs(self, draw: int, count: int) -> tuple[float, tuple[tuple[int, float], ...], int]:
        return -1.0, tuple((token, -1.0 - token) for token in range(count)), 1


class StubStep:
    """Describes a step as the CUDA backend does, and returns made-up tokens."""

    def __init__(self, config: ModelConfig) -> None:
        self._shape = steps.Shape(config.num_heads, config.num_kv_heads, 264, 16384)
        self._out = np.zeros(1 << 20, np.int32)
        self._random = np.random.default_rng(0)
        self._rows = packed_rows(config.vocab_size)

    @property
    def sampling(self) -> StubStep:
        return self

    def run(self, batch: Batch) -> np.ndarray:
        raise NotImplementedError("the stub draws every token itself")

    def kept(self) -> np.ndarray:
        raise NotImplementedError("the stub computes no rows")

    def can_draw(self, params: Any) -> bool:
        return True

    def add_sampler(self, number: int, sampler: Any) -> None:
        if self._rows is not None:
            self._rows.add(number, sampler)

    def remove_sampler(self, number: int) -> None:
        if self._rows is not None:
            self._rows.remove(number)

    def launch(self, batch: Batch, draws: Draws) -> StubLaunched:
        words = None if self._rows is None else self._rows.words(draws.samplers, draws.positions)[0]
        arrays, sources = batch.arrays(), np.asarray(draws.sources)
        rows, logits = len(arrays.ids), max(1, len(arrays.logit_rows))
        steps.describe(self._out, arrays, rows, logits, [self._shape], sources=sources, params=words)
        return StubLaunched(self._random.integers(100, COMMON, len(draws)).tolist())


def packed_rows(vocab_size: int) -> Any:
    """The CUDA backend's packing of draws, where torch is installed."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError:
        return None
    from unspool.ops.cuda.sampler import Rows

    return Rows(vocab_size, torch.device("cpu"))


class StubOps:
    """A body that has no numbers: a model is built on it and never computed."""

    name = kernel_set = "stub"
    loads_late = False

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def matrix(self, parts: Sequence[Any]) -> None:
        return None

    vector = matrix

    def kv_cache(self, layers: Any, engine: EngineConfig, num_blocks: Any, num_states: int = 0) -> StubKV:
        return StubKV(engine.block_size)

    def finish_loading(self, progress: Any = None) -> None: ...

    def kv_room(self, widths: Any, engine: EngineConfig) -> None:
        return None

    def compile(self, forward: Any, kv: StubKV) -> StubStep:
        return StubStep(self._config)


def make_engine(requests: int, tokens: int, *, text: bool, block_size: int = BLOCK_SIZE) -> Engine:
    config = EngineConfig(
        device="cuda",
        block_size=block_size,
        kv_tokens=requests * (tokens + block_size),
        step_tokens=8192,
        chunk_tokens=8192,
        max_running=requests,
    )
    tokenizer = None
    if text:
        from unspool.models.checkpoint import open_checkpoint
        from unspool.weights.store import resolve

        tokenizer = open_checkpoint(resolve("smollm2")).tokenizer()
    ops: Any = StubOps(SHAPE)
    return Engine(random_checkpoint(SHAPE), config, tokenizer=tokenizer, ops=ops)


def step_times(engine: Engine, requests: int, prompt: int, tokens: int, params: SamplingParams) -> list[float]:
    """Seconds of each step in which all requests decode."""
    rng = np.random.default_rng(0)
    for _ in range(requests):
        engine.add(rng.integers(0, engine.checkpoint.config.vocab_size, prompt).tolist(), params)
    times: list[float] = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times[-tokens + 4 : -4]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="unspool bench host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--text", action="store_true", help="with the default model's tokenizer")
    parser.add_argument("--stop", action="append", default=[], help="a stop string, with --text")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--logprobs", type=int)
    parser.add_argument("--profile", action="store_true", help="where the time goes, by Python's profiler")
    options = parser.parse_args(argv)
    record = Run("host", argv)
    engine = make_engine(options.requests, options.prompt + options.tokens, text=options.text)
    params = SamplingParams(
        max_tokens=options.tokens,
        ignore_eos=True,
        seed=1,
        temperature=options.temperature,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
        logprobs=options.logprobs,
        stop=options.stop,
    )
    run = (engine, options.requests, options.prompt, options.tokens, params)
    step_times(*run)
    if options.profile:
        import cProfile

        cProfile.runctx("step_times(*run)", globals(), {"run": run}, sort="tottime")
    times = step_times(*run)
    took = 1e6 * statistics.median(times)
    print(f"{options.requests} requests: {took:,.0f} µs a step, {took / options.requests:.2f} µs a token")
    return record.finish({**vars(options), "us_per_step": took, "steps": len(times)})

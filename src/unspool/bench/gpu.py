"""Decoding, prefill and many requests at once on one NVIDIA GPU, with random weights at a named shape.

    unspool bench gpu                                  Llama-8B's shape, bf16
    unspool bench gpu --random llama-1b --only decode
    unspool bench kernels --random llama-8b            every kernel's share of the card's limits

`decode` runs the engine as it serves: tokens chosen on the device, one step ahead of the host; milliseconds a token,
beside the floor (a step's bytes at the card's measured read bandwidth). `prefill` computes prompts of 4,096 tokens;
`serve` answers 256 requests of 512 tokens with 256 tokens each; `sampling` goes from logits to tokens; `laws` asks one
prompt alone and 32 times a round among random neighbours, and counts the different answers, logprobs included. Kernels
are compiled when first needed and kept on disk: a second run starts warm. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.config import EngineConfig
from unspool.machine import measure_gpu_bandwidth
from unspool.models.checkpoint import Checkpoint
from unspool.models.costs import step_costs
from unspool.models.random import stand_in
from unspool.models.registry import architecture_of
from unspool.models.shapes import SHAPES
from unspool.ops.cuda import require_card
from unspool.ops.cuda.memory import weight_bytes
from unspool.ops.storage import kv_bytes_per_token
from unspool.reporting import Run

if TYPE_CHECKING:
    from unspool.engine.engine import Engine

BLOCK_SIZE = 128  # a block is a tile of keys: the copy engine brings it in one piece
MEASURES = ("decode", "prefill", "serve", "sampling", "laws")
SPEEDS = {"decode", "prefill", "serve"}  # of one engine, without a prefix cache
# What `sampling` draws with: (temperature, top-k, top-p, how many best tokens are reported, or -1).
DRAWS = {
    "greedy": (0.0, 0, 1.0, -1),
    "plain": (1.0, 0, 1.0, -1),
    "top-k 50, top-p 0.95": (0.8, 50, 0.95, -1),
    "top-p 0.9": (1.0, 0, 0.9, -1),
    "logprobs 5": (1.0, 0, 1.0, 5),
}


def make_engine(checkpoint: Checkpoint, *, kv_tokens: int, step_tokens: int, prefix_cache: bool = False) -> Engine:
    from unspool.engine.engine import Engine

    engine = EngineConfig(
        device="cuda",
        block_size=BLOCK_SIZE,
        kv_tokens=kv_tokens,
        step_tokens=step_tokens,
        chunk_tokens=step_tokens,
        prefix_cache=prefix_cache,
    )
    return Engine(checkpoint, engine)


# Work ---------------------------------------------------------------------------------------------------------------
def answer(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, **params: Any) -> tuple[float, list[float]]:
    """Seconds for all of it, and when each step ended (a token need not make text, so that events may be fewer)."""
    from unspool.events import Failed
    from unspool.params import SamplingParams

    # Random weights repeat themselves, which is quickly guessed: a step is to make one token here.
    given: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "speculate": "off"} | params
    asked = SamplingParams(max_tokens=tokens, **given)
    for prompt in prompts:
        engine.add(prompt, asked)
    start = time.perf_counter()
    times = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
        times.append(time.perf_counter() - start)
    return time.perf_counter() - start, times


def prompt_of(seed: int, length: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def decode(engine: Engine, batch: int, context: int, tokens: int) -> float:
    """Milliseconds a step, the prompts left out: the median time between two steps' tokens."""
    vocab_size = engine.checkpoint.config.vocab_size
    prompts = [prompt_of(i, context, vocab_size) for i in range(batch)]
    _, times = answer(engine, prompts, tokens)
    gaps = [b - a for a, b in zip(times[-tokens + 8 :], times[-tokens + 9 :], strict=False)]
    return 1000 * statistics.median(gaps)


def decode_rows(engine: Engine, read_bandwidth: float) -> dict[str, Any]:
    out = {}
    for batch, tokens in ((1, 128), (8, 64), (32, 64), (128, 48)):
        answer(engine, [prompt_of(i, 512, 1000) for i in range(batch)], 4)  # compiles and captures
        took = decode(engine, batch, 512, tokens)
        floor = 1000 * step_bytes(engine.checkpoint, batch, 512 + tokens // 2) / read_bandwidth
        out[str(batch)] = {"ms": took, "floor_ms": floor}
        print(f"decode, batch {batch:4d}, 512-token prompts   {took:7.3f} ms a step   floor {floor:.3f}", flush=True)
    return out


def prefill(engine: Engine, prompts: int, length: int) -> float:
    """Prompt tokens a second, one answered token each."""
    work = [prompt_of(i, length, engine.checkpoint.config.vocab_size) for i in range(prompts)]
    seconds, _ = answer(engine, work, 1)
    return prompts * length / seconds


def serve(engine: Engine, requests: int, length: int, tokens: int) -> tuple[float, float]:
    """Answered tokens a second, everything asked at once, and the milliseconds of a step in the middle: all decode."""
    work = [prompt_of(i, length, engine.checkpoint.config.vocab_size) for i in range(requests)]
    seconds, times = answer(engine, work, tokens)
    middle = [b - a for a, b in pairwise(times)][len(times) // 4 : -len(times) // 4]
    return requests * tokens / seconds, 1000 * statistics.median(middle)


def speed(engine: Engine, wanted: Sequence[str], bandwidth: float) -> dict[str, Any]:
    """Those of decode, prefill and serve that are wanted."""
    result: dict[str, Any] = {}
    if "decode" in wanted:
        result["decode"] = decode_rows(engine, bandwidth)
    if "prefill" in wanted:
        prefill(engine, 2, 4096)
        result["prefill_tokens_per_second"] = prefill(engine, 16, 4096)
        print(f"prefill, 16 × 4,096 tokens: {result['prefill_tokens_per_second']:,.0f} tokens/s", flush=True)
    if "serve" in wanted:
        # A first time makes the graphs of whatever numbers of rows come up; a server that has run a while has them.
        first, _ = serve(engine, 256, 512, 256)
        again, step = serve(engine, 256, 512, 256)
        result |= {"first_serve_tokens_per_second": first, "serve_tokens_per_second": again, "serve_step_ms": step}
        rates = f"{again:,.0f} tokens/s, a step of 256 in {step:.2f} ms; the first time {first:,.0f} tokens/s"
        print(f"256 requests of 512 in, 256 out: {rates}", flush=True)
    return result


def laws(engine: Engine, rounds: int, copies: int = 16) -> dict[str, int]:
    """One prompt, greedy and drawn: alone first, then several times among neighbours of random lengths, in any order.
    How many completions there were, how many of them found the prompt in the cache, and different answers among them:
    tokens and the bits of their logprobs."""
    from unspool.params import SamplingParams

    rng = random.Random(0)
    vocab_size = engine.checkpoint.config.vocab_size
    prompt = prompt_of(99, 333, vocab_size)
    seen: dict[float, set[tuple[tuple[int, float | None], ...]]] = {0.0: set(), 1.0: set()}
    counts = {"completions": 0, "cached": 0}
    for round in range(rounds):
        asked: list[tuple[Sequence[int], SamplingParams, float | None]] = []
        for temperature in seen:
            own = SamplingParams(max_tokens=32, temperature=temperature, seed=1, ignore_eos=True, logprobs=0)
            asked += [(prompt, own, temperature)] * (1 if round == 0 else copies)
        for i in range(0 if round == 0 else rng.choice([1, 5, 30, 120, 256 - 2 * copies])):
            some = SamplingParams(max_tokens=rng.randint(1, 60), temperature=1, seed=i, ignore_eos=True)
            asked.append((prompt_of(1000 * round + i, rng.randint(1, 900), vocab_size), some, None))
        rng.shuffle(asked)
        ids: dict[str, float] = {}
        for tokens, params, watched in asked:
            id = engine.add(tokens, params)
            if watched is not None:
                ids[id] = watched
        answers: dict[str, list[tuple[int, float | None]]] = {id: [] for id in ids}
        while engine.has_work:
            for event in engine.step():
                if event.request in answers:
                    answers[event.request] += [(token.id, token.logprob) for token in getattr(event, "tokens", ())]
                    usage = getattr(event, "usage", None)
                    counts["cached"] += usage is not None and usage.cached_tokens > 0
        counts["completions"] += len(answers)
        for id, answer in answers.items():
            seen[ids[id]].add(tuple(answer))
    return counts | {"answers": sum(len(answers) for answers in seen.values())}


def sampling(vocab_size: int, spread: float) -> dict[str, dict[str, float]]:
    """Microseconds from logits to tokens, by what shapes the draw and by rows. Logits are normal with this spread: 1 is
    as flat as random weights make them, 4 as steep as a model's."""
    import torch

    from unspool.ops.cuda.runner import LaunchGraph
    from unspool.ops.cuda.sampler import WANTS_LOGPROBS, WORDS, SampleRows, SamplingRoom, results_room
    from unspool.ops.cuda.sampling import PLANES
    from unspool.ops.cuda.steps import HEADER, ROW_PARAMS

    out: dict[str, dict[str, float]] = {}
    device = torch.device("cuda")
    planes = torch.zeros((1, PLANES, 1), dtype=torch.int32, device=device)
    for rows in (1, 16, 128, 256):
        logits = spread * torch.randn(rows, vocab_size, device=device)
        room, results = SamplingRoom(rows, vocab_size, device), results_room(rows, 1, device)
        sampled = torch.zeros(rows, dtype=torch.int32, device=device)
        for name, (temperature, top_k, top_p, tops) in DRAWS.items():
            some = SampleRows.greedy(rows)
            some.temperature[:], some.top_k[:], some.top_p[:] = temperature, top_k, top_p
            some.seed[:] = range(rows)
            some.flags[:], some.tops[:] = (0, 0) if tops < 0 else (WANTS_LOGPROBS, tops)
            words = np.zeros(HEADER + rows * WORDS, np.int32)
            words[ROW_PARAMS], words[HEADER:] = HEADER, some.words().reshape(-1)
            args = (logits, rows, torch.from_numpy(words).to(device), planes, sampled, results)
            graph = LaunchGraph(room.launches(*args, filtered=some.is_filtered, wants_logprobs=some.wants_logprobs))
            for _ in range(3):
                graph.run()
            took = 1e6 * statistics.median(event_seconds(graph.run) for _ in range(20))
            out.setdefault(name, {})[str(rows)] = took
    for name, by_rows in out.items():
        times = ", ".join(f"{took:.0f} µs at {rows}" for rows, took in by_rows.items())
        print(f"sampling, {name}, spread {spread:g}: {times}", flush=True)
    return out


# The card -----------------------------------------------------------------------------------------------------------
def step_bytes(checkpoint: Checkpoint, batch: int, context: int) -> int:
    """What one step of decoding must read: every weight once (of an embedding that is not the head, its rows alone; of
    experts, as many as so many rows are expected to use), and the keys and values of every sequence."""
    config, weights = checkpoint.config, checkpoint.weights.values()
    per_token = kv_bytes_per_token(architecture_of(config).storage, "f16", keys_alone=True)
    costs = step_costs(config, weights, per_token, lambda weight: weight_bytes([weight]))
    return int(costs.weight_bytes(batch) + batch * costs.cache_bytes(context))


def event_seconds(work: Callable[[], Any]) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) / 1000)


def versions() -> dict[str, str]:
    import torch
    import triton

    from unspool.version import VERSION

    card = torch.cuda.get_device_name()
    return {"unspool": VERSION, "torch": torch.__version__, "triton": triton.__version__, "card": card}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="unspool bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random", default="llama-8b", metavar="SHAPE[:FORMAT]", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--only", action="append", choices=MEASURES, help="one of the measures; repeatable (all)")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of `laws` (12); 33 are 1,026 completions")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"argument --rounds: {options.rounds} is not 1 or more")
    require_card()
    wanted = options.only or MEASURES
    checkpoint = stand_in(options.random)
    config = checkpoint.config
    run = Run("gpu", argv)
    result: dict[str, Any] = {"shape": options.random, **versions()}
    bandwidth = result["read_bandwidth"] = measure_gpu_bandwidth().bytes_per_second
    print(f"{result['card']}: reads {bandwidth / 1e12:.2f} TB/s", flush=True)

    def started(*, prefix_cache: bool = False) -> Engine:
        start = time.perf_counter()
        engine = make_engine(checkpoint, kv_tokens=262_144, step_tokens=8192, prefix_cache=prefix_cache)
        answer(engine, [prompt_of(0, 37, config.vocab_size)], 2)
        took = time.perf_counter() - start
        result.setdefault("ready_seconds", took)
        print(f"weights loaded and two tokens answered in {took:.1f} s", flush=True)
        return engine

    if not SPEEDS.isdisjoint(wanted):
        result |= speed(started(), wanted, bandwidth)
        gc.collect()
    if "sampling" in wanted:
        result["sampling_us"] = {str(spread): sampling(config.vocab_size, spread) for spread in (1.0, 4.0)}
    if "laws" in wanted:
        found = result["laws"] = laws(started(prefix_cache=True), options.rounds)
        shown = f"{found['completions']:,} completions, {found['cached']:,} from the cache"
        print(f"one prompt, greedy and drawn: {shown}; different answers: {found['answers']} (2 is right)", flush=True)
    return run.finish(result)

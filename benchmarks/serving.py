"""Serving under load: tokens a second, time to first token and between tokens, beside llama.cpp's server.

    python -m benchmarks serving                          1, 4, 16 and 64 clients
    python -m benchmarks serving --clients 1 --no-peer

Both servers run the same file on the same cores, and their rounds alternate, for machines drift: a ratio is taken
within a round, and the median of the rounds is shown. A client keeps its connection, asks, reads its stream to the end
and asks again.

The server's overhead is how much longer it takes than the bare engine for the same requests: the same texts with the
same parameters, tokenized within the time, as many at once, the next one added when one ends, and nothing between the
engine and whoever calls it. What the load generator itself takes from the cores is in the server's time; its processor
time is shown beside. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.bench import clients
from unspool.bench.clients import Round, Sample
from unspool.errors import BackendError
from unspool.machine import num_cores
from unspool.quiet import Watch

QUIET_CORES, TRIES = 0.15, 3  # a turn that others disturbed more than this is made again, so many times at most
SETTLE_SECONDS = 0.1  # in which the threads of the engine before go to sleep
WORDS = [word + ending for word in ("time", "house", "river", "light", "stone") for ending in ("", "s", "less", "ly")]


@dataclass(frozen=True)
class Load:
    clients: int
    requests: int
    prompt_words: int
    max_tokens: int

    def prompts(self, salt: str) -> list[str]:
        """Every prompt its own from its first word, so that no prefix is shared, in no round of any level."""
        rng = random.Random(f"{self.clients} {salt}")
        return [" ".join(rng.choices(WORDS, k=self.prompt_words)) for _ in range(self.requests)]

    def bodies(self, salt: str, more: dict[str, Any]) -> list[dict[str, Any]]:
        fixed: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        fixed |= {"stream_options": {"include_usage": True}, **more}
        return [{"prompt": prompt, **fixed} for prompt in self.prompts(salt)]


class Bare:
    """The engine alone, with the same closed loop of requests."""

    def __init__(self, model: Path, threads: int) -> None:
        from unspool.llm import LLM

        self.llm = LLM(model, threads=threads)

    pid: int | None = None  # it works in this process

    def drive(self, load: Load, salt: str) -> Round:
        from unspool.events import Finished
        from unspool.params import SamplingParams

        params = SamplingParams(max_tokens=load.max_tokens, temperature=0, ignore_eos=True)
        prompts = iter(load.prompts(salt))
        engine, samples, starts = self.llm.engine, {}, {}
        start = time.perf_counter()

        def add() -> None:
            prompt = next(prompts, None)
            if prompt is not None:
                id = engine.add(self.llm.encode(prompt), params)
                samples[id], starts[id] = Sample(), time.perf_counter()

        for _ in range(load.clients):
            add()
        while engine.has_work:
            for event in engine.step():
                sample = samples[event.request]
                if isinstance(event, Finished):
                    sample.tokens = event.usage.completion_tokens
                    add()
                else:
                    sample.arrivals.append(time.perf_counter() - starts[event.request])
        return Round(time.perf_counter() - start, list(samples.values()))


# Servers ------------------------------------------------------------------------------------------------------------
class Server:
    def __init__(self, name: str, command: list[str], port: int, more: dict[str, Any]) -> None:
        self.name, self.port, self.more = name, port, more
        start = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.pid = self._process.pid
        self._wait()
        self.start_seconds = time.perf_counter() - start

    def _wait(self) -> None:
        import urllib.request

        for _ in range(6000):
            if self._process.poll() is not None:
                raise BackendError(f"{self.name} ended with status {self._process.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                    return
            except OSError:
                time.sleep(0.02)
        raise BackendError(f"{self.name} did not start within two minutes")

    def drive(self, load: Load, salt: str) -> Round:
        return clients.drive(self.port, load.bodies(salt, self.more), load.clients)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def our_server(model: Path, threads: int) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "unspool", "serve", "-m", str(model), "--port", str(port), "--log", "off"]
    return Server("unspool", [*command, "--threads", str(threads), "--drain", "0"], port, {})


def their_server(model: Path, threads: int, slots: int, tokens: int) -> Server:
    from benchmarks.llama_server import PACKAGE, command
    from benchmarks.peer import environment
    from unspool.weights.store import cache_dir

    port = free_port()
    started = command(environment(cache_dir(), PACKAGE, [PACKAGE]), model, port, slots, slots * tokens, threads)
    return Server("llama.cpp", started, port, {"cache_prompt": False})


# Measuring ----------------------------------------------------------------------------------------------------------
def measure(sides: dict[str, Any], load: Load, rounds: int) -> dict[str, Any]:
    """Rounds of every side in turn, each side first in its turn; a warm-up round of each does not count."""
    kept: dict[str, list[Round]] = {name: [] for name in sides}
    small = Load(load.clients, load.clients, load.prompt_words, min(8, load.max_tokens))
    for side in sides.values():
        side.drive(small, salt="warm")
    names, num_disturbed = list(sides), 0
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            others, done = quietly(sides[name], load, str(number))
            num_disturbed += others > QUIET_CORES
            kept[name].append(done)
    result: dict[str, Any] = {"clients": load.clients, "rounds": rounds, "requests": load.requests * rounds}
    result |= {"disturbed": num_disturbed} | {name: clients.summary(done) for name, done in kept.items()}
    ratios = [bare.rate / served.rate - 1 for bare, served in zip(kept["bare"], kept["unspool"], strict=True)]
    result["overhead"] = statistics.median(ratios)
    result["overhead_quartiles"] = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else None
    if "llama.cpp" in kept:
        both = zip(kept["unspool"], kept["llama.cpp"], strict=True)
        result["ratio"] = statistics.median(ours.rate / theirs.rate for ours, theirs in both)
    report(result, names)
    return result


def quietly(side: Any, load: Load, salt: str) -> tuple[float, Round]:
    """A turn of one side, and how many cores other processes kept busy: the quietest of a few, if they did."""
    turns: list[tuple[float, Round]] = []
    while not turns or (len(turns) < TRIES and turns[-1][0] > QUIET_CORES):
        time.sleep(SETTLE_SECONDS)
        watch = Watch(side.pid)
        done = side.drive(load, f"{salt}.{len(turns)}")
        turns.append((watch.others(side.pid), done))
    return min(turns, key=lambda turn: turn[0])


def report(result: dict[str, Any], names: list[str]) -> None:
    for name in names:
        row = result[name]
        print(
            f"{result['clients']:>4} clients  {name:<10} {row['tokens_per_second']:8.1f} tokens/s"
            f"   first {row['ttft_p50_ms']:8.1f} ms (p99 {row['ttft_p99_ms']:8.1f})"
            f"   between {row['tbt_p50_ms']:7.2f} ms (p99 {row['tbt_p99_ms']:7.2f})"
        )
    ratio = f", {result['ratio']:.2f} times llama.cpp" if "ratio" in result else ""
    generator = f"load generator {result['unspool']['generator_us_per_token']:.0f} µs a token"
    quartiles = " to ".join(f"{100 * value:.1f}" for value in result["overhead_quartiles"] or ())
    print(
        f"              server's overhead over the bare engine {100 * result['overhead']:.1f}% (quartiles {quartiles}%)"
        f"{ratio}; {generator}; {result['disturbed']} of {len(names) * result['rounds']} turns disturbed",
        flush=True,
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = num_cores()
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--clients", default="1,4,16,64", help="numbers of clients (1,4,16,64)")
    parser.add_argument("--requests", type=int, default=48, help="of each side with so many clients, at least (48)")
    parser.add_argument("--prompt-words", type=int, default=128, help="words of a prompt (128)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of an answer (64)")
    parser.add_argument("--rounds", type=int, default=3, help="of each side with so many clients, at least (3)")
    parser.add_argument("--threads", type=int, default=cores, help=f"threads of each engine ({cores})")
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp")
    options = parser.parse_args(argv)

    from unspool.weights.store import resolve

    model = resolve(options.model)
    levels = [int(part) for part in options.clients.split(",")]
    servers = [our_server(model, options.threads)]
    try:
        if not options.no_peer:
            room = 2 * options.prompt_words + options.max_tokens + 64  # tokens of one request, with room to spare
            servers.append(their_server(model, options.threads, max(levels), room))
        sides: dict[str, Any] = {"bare": Bare(model, options.threads), **{server.name: server for server in servers}}
        results = []
        for level in levels:
            # Short rounds and many: drift within a round is small, and chance evens out.
            load = Load(level, max(2, level), options.prompt_words, options.max_tokens)
            results.append(measure(sides, load, max(options.rounds, options.requests // load.requests)))
        started = {server.name: server.start_seconds for server in servers}
    finally:
        for server in servers:
            server.stop()
    about = {"model": model.name, "threads": options.threads, "start_seconds": started}
    about |= {"prompt_words": options.prompt_words, "max_tokens": options.max_tokens}
    print(json.dumps({"benchmark": "serving", **about, "levels": results}))
    return 0

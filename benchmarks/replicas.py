"""Several replicas: the cost of the hop to one, the throughput of two, and routing by prefixes against load alone.

    python -m benchmarks replicas                       both experiments, with replicas on Ray if it is installed
    python -m benchmarks replicas --only routing

hop       one process, and servers in front of one and of two replicas, under the same closed load: tokens a second,
          times to the first token and between tokens. Each server has all cores: two replicas have half of the threads.
routing   multi-turn chats, each turn on the answer before, in front of two replicas: the share of prompt tokens that
          were found in a prefix cache and the time to first token, with prefix routing and by load alone. With two
          replicas the latter is power-of-two-choices routing.

Rounds of what is compared alternate. `others` is how many cores other programs kept busy meanwhile. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving import WORDS, Load, Server, free_port
from unspool.bench import clients
from unspool.bench.clients import Round
from unspool.machine import num_cores
from unspool.openai_client import Endpoint, Reply, ask
from unspool.quiet import busy_seconds, process_seconds

EXPERIMENTS = ("hop", "routing")
SETTLE_SECONDS = 1.5  # in which threads go to sleep and replicas report what they hold


# Servers --------------------------------------------------------------------------------------------------------------
def started(name: str, model: Path, threads: int, *more: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "unspool", "serve", "-m", str(model), "--port", str(port), "--log", "off"]
    return Server(name, [*command, "--threads", str(threads), "--drain", "0", "--kv-tokens", "16384", *more], port, {})


def routed(name: str, model: Path, by_prefix: bool) -> Server:
    port = free_port()
    code = "import sys; from benchmarks.replicas import serve_routed; serve_routed(*sys.argv[1:])"
    return Server(name, [sys.executable, "-c", code, str(model), str(port), str(int(by_prefix))], port, {})


def serve_routed(model: str, port: str, by_prefix: str) -> None:
    """Two replicas behind one port, in a process of its own."""
    from unspool.cluster.models import ModelSource
    from unspool.cluster.routing import Rule
    from unspool.cluster.serve_local import serve_local
    from unspool.server.config import ServerConfig

    source = ModelSource(model, options={"threads": max(1, num_cores() // 2), "kv_tokens": 16384})
    config = ServerConfig(port=int(port), log_format="off", drain=0.0)
    serve_local(source, config, 2, rule=Rule(by_prefix=by_prefix == "1"))


def metrics(server: Server) -> dict[str, float]:
    """The sum of each metric's samples: over replicas, where there are several."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as page:
        families = text_string_to_metric_families(page.read().decode())
    totals: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def wait_for_replicas(server: Server, count: int) -> None:
    until = time.monotonic() + 300
    while metrics(server).get("unspool:replicas") != count:
        if time.monotonic() > until:
            raise TimeoutError(f"{server.name} has not {count} replicas after five minutes")
        time.sleep(0.2)


class Watched:
    """How many cores were kept busy by other programs than this one, a server and the processes below it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._own, self._all, self._began = self._ours(), self._busy(), time.perf_counter()

    def others(self) -> float:
        seconds = time.perf_counter() - self._began
        return max(0.0, (self._busy() - self._all - (self._ours() - self._own)) / seconds)

    @staticmethod
    def _busy() -> float:
        return busy_seconds(Path("/proc/stat").read_text())

    def _ours(self) -> float:
        stats = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    stats[int(entry.name)] = (entry / "stat").read_text()
                except OSError:  # it has ended
                    continue
        parents = {pid: int(stat.rpartition(") ")[2].split()[1]) for pid, stat in stats.items()}
        ours = {self._server.pid}
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        return sum(process_seconds(stats[pid]) for pid in ours | {os.getpid()} if pid in stats)


# The hop --------------------------------------------------------------------------------------------------------------
def hop(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    cores = num_cores()
    half = str(max(1, cores // 2))
    servers = [started("one process", model, cores)]
    try:
        servers.append(started("1 local", model, cores, "--replicas", "numa:1"))
        servers.append(started("2 local", model, int(half), "--replicas", "numa:2"))
        if options.ray:
            servers.append(started("1 Ray", model, cores, "--replicas", "1"))
            servers.append(started("2 Ray", model, int(half), "--replicas", "2"))
        for server in servers[1:]:
            wait_for_replicas(server, int(server.name[0]))
        return {"levels": [_level(servers, level, options) for level in options.clients]}
    finally:
        for server in servers:
            server.stop()


def _level(servers: Sequence[Server], level: int, options: argparse.Namespace) -> dict[str, Any]:
    load = Load(level, max(3, level), options.prompt_words, options.max_tokens)
    rounds: dict[str, list[Round]] = {server.name: [] for server in servers}
    others: dict[str, list[float]] = {server.name: [] for server in servers}
    for server in servers:
        server.drive(Load(level, level, options.prompt_words, 8), "warm")
    for number in range(options.rounds):
        turn = number % len(servers)
        for server in (*servers[turn:], *servers[:turn]):
            time.sleep(0.2)
            watched = Watched(server)
            rounds[server.name].append(server.drive(load, str(number)))
            others[server.name].append(watched.others())
    first = rounds[servers[0].name]
    result: dict[str, Any] = {"clients": level, "rounds": options.rounds, "requests": load.requests}
    for name, done in rounds.items():
        ratio = statistics.median(here.rate / one.rate for here, one in zip(done, first, strict=True))
        row = {**clients.summary(done), "ratio": ratio, "others": statistics.median(others[name])}
        result[name] = row
        print(
            f"{level:>4} clients  {name:<12} {row['tokens_per_second']:8.1f} tokens/s ({ratio:.2f})"
            f"   first {row['ttft_p50_ms']:8.1f} ms (p99 {row['ttft_p99_ms']:8.1f})"
            f"   between {row['tbt_p50_ms']:7.2f} ms   others {row['others']:.2f}",
            flush=True,
        )
    return result


# Routing --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Chats:
    count: int
    at_once: int
    turns: int
    system_words: int
    user_words: int
    max_tokens: int


async def converse(server: Server, chats: Chats, salt: str) -> list[Reply]:
    """All chats, so many at once; the next turn of each follows its answer. Later turns are what routing is about, so
    only they are returned."""
    endpoint, later, free = Endpoint(f"http://127.0.0.1:{server.port}"), [], asyncio.Semaphore(chats.at_once)

    async def chat(number: int) -> None:
        rng = random.Random(f"{salt} {number}")
        messages = [{"role": "system", "content": " ".join(rng.choices(WORDS, k=chats.system_words))}]
        async with free:
            for turn in range(chats.turns):
                messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=chats.user_words))})
                body = {"messages": list(messages), "max_tokens": chats.max_tokens, "temperature": 0, "stream": True}
                reply = await ask(endpoint, "chat/completions", body | {"ignore_eos": True})
                if reply.error is not None:
                    raise RuntimeError(f"{server.name}: {reply.error}")
                if turn:
                    later.append(reply)
                messages.append({"role": "assistant", "content": reply.text})

    await asyncio.gather(*map(chat, range(chats.count)))
    return later


def routing(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    chats = Chats(options.chats, options.at_once, options.turns, options.prompt_words, 24, 24)
    servers: list[Server] = []
    found: dict[str, dict[str, list[float]]] = {}
    try:
        for name, by_prefix in (("by prefix", True), ("by load", False)):
            servers.append(routed(name, model, by_prefix))
            found[name] = {"hit_rate": [], "first": [], "others": []}
            wait_for_replicas(servers[-1], 2)
        for number in range(options.rounds):
            for server in servers if number % 2 == 0 else servers[::-1]:
                _round(server, chats, f"round {number}", found[server.name])
    finally:
        for server in servers:
            server.stop()
    rows = {}
    for name, values in found.items():
        first = sorted(values["first"])
        rows[name] = {
            "hit_rate": statistics.median(values["hit_rate"]),
            "ttft_p50_ms": 1000 * clients.quantile(first, 0.5),
            "ttft_p90_ms": 1000 * clients.quantile(first, 0.9),
            "others": statistics.median(values["others"]),
        }
        print(
            f"routing {name:<10} hits {100 * rows[name]['hit_rate']:5.1f}% of prompt tokens"
            f"   first token of later turns {rows[name]['ttft_p50_ms']:7.1f} ms (p90 {rows[name]['ttft_p90_ms']:7.1f})"
            f"   others {rows[name]['others']:.2f}"
        )
    return {"rounds": options.rounds, **vars(chats), "rows": rows}


def _round(server: Server, chats: Chats, salt: str, values: dict[str, list[float]]) -> None:
    time.sleep(SETTLE_SECONDS)
    before, watched = metrics(server), Watched(server)
    later = asyncio.run(converse(server, chats, salt))
    values["others"].append(watched.others())
    time.sleep(SETTLE_SECONDS)
    after = metrics(server)
    hits, asked = (after[f"unspool:prefix_cache_{each}_total"] - before[f"unspool:prefix_cache_{each}_total"]
                   for each in ("hits", "queries"))  # fmt: skip
    values["hit_rate"].append(hits / asked)
    values["first"] += [reply.first for reply in later if reply.first is not None]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks replicas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--only", choices=EXPERIMENTS, action="append", help="run this experiment (repeatable)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8], help="of the hop, at once (1 8)")
    parser.add_argument("--rounds", type=int, default=5, help="of each server (5)")
    parser.add_argument("--prompt-words", type=int, default=128, help="of a prompt, or of a chat's first message (128)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer of the hop (48)")
    parser.add_argument("--chats", type=int, default=8, help="of a round (8)")
    parser.add_argument("--at-once", type=int, default=4, help="of them (4)")
    parser.add_argument("--turns", type=int, default=4, help="of each (4)")
    parser.add_argument("--no-ray", dest="ray", action="store_false", help="local replicas alone")
    options = parser.parse_args(argv)
    options.ray = options.ray and has_ray()

    from unspool.weights.store import resolve

    model = resolve(options.model)
    results: dict[str, Any] = {"benchmark": "replicas", "model": model.name, "cores": num_cores()}
    for name in options.only or EXPERIMENTS:
        results[name] = globals()[name](model, options)
    print(json.dumps(results))
    return 0


def has_ray() -> bool:
    from importlib.util import find_spec

    return find_spec("ray") is not None

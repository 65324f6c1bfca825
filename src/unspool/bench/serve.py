"""Serving under an open load: any OpenAI-compatible server, requests that come whether or not it keeps up.

    unspool bench serve --url http://127.0.0.1:8000 --rate 1 2 4
    unspool bench serve --url ours=http://… --url theirs=http://… --rate 2 --requests 60
    unspool bench serve --url http://… --turns 4             chats: each turn follows the answer before
    unspool bench serve --url ours=http://127.0.0.1:8000 --pid ours=4711        shows what other programs used meanwhile

Arrivals are a Poisson process: users do not wait for one another. Time to first token and between tokens are shown as
percentiles; goodput is the rate of requests that met both targets (--first, --between), failures not among them. With
several servers, rounds of the same requests alternate. A server that fails or hangs is shown as such: every request has
a time limit. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.bench.workload import MIXES, Job, jobs_of, words
from unspool.errors import RequestError
from unspool.openai_client import Endpoint, Reply, ask, model_of
from unspool.quiet import Watch
from unspool.reporting import (
    Journal,
    Progress,
    Run,
    add_output,
    check_plot,
    figure,
    print_table,
    progress,
    quantile,
)

GIVE_UP = 8  # failures in a row, nothing having succeeded: the server is not there
THINKING = 2.0  # mean seconds before a user's next turn


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.requests < 1 or min(options.rate) <= 0 or options.turns < 1 or options.timeout <= 0:
        parser.error("--requests and --turns are at least 1; --rate and --timeout are above 0")
    check_plot(options.plot)
    settings = {name: value for name, value in vars(options).items() if name not in ("plot", "keep", "key", "pid")}
    journal = Journal(options.keep, settings)
    run = Run("serve", argv, plot=options.plot, is_here=False)
    interrupted = False
    try:
        pids = pids_of(options)
        servers = [open_server(given, pids, options) for given in options.url]
        for rate in options.rate:
            for server in servers:
                if not any((row["server"], row["rate"]) == (server.name, rate) for row in journal.items):
                    journal.add(measure(server, rate, options))
    except KeyboardInterrupt:
        interrupted = True
        journal.note_interrupted()
    report(journal.items, options)
    if options.plot is not None and journal.items:
        draw(journal.items, options)
    failed = any(row["requests"] == row["failed"] for row in journal.items)
    return run.finish({"targets": targets(options), "rows": journal.items}, interrupted=interrupted, failed=failed)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "unspool bench serve", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", action="append", required=True, metavar="[NAME=]URL", help="a server; repeatable")
    parser.add_argument("--model", help="as the server calls it (the first that it lists)")
    parser.add_argument("--key", help="the server's API key")
    parser.add_argument("--rate", type=float, nargs="+", default=[1.0], help="requests (or chats) a second (1)")
    parser.add_argument("--requests", type=int, default=50, help="of each server at each rate (50)")
    parser.add_argument("--mix", choices=list(MIXES), default="chat", help="lengths of prompts and answers (chat)")
    parser.add_argument("--turns", type=int, default=1, help="of a chat; 1: single requests (1)")
    parser.add_argument("--first", type=float, default=1.0, help="target: seconds to the first token (1)")
    parser.add_argument("--between", type=float, default=0.1, help="target: mean seconds between tokens (0.1)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a request (120)")
    parser.add_argument(
        "--pid", action="append", default=[], metavar="[NAME=]PID",
        help="the process of a server on this machine, to report what others used; repeatable",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and texts (0)")
    add_output(parser, resumable=True)
    return parser


def targets(options: argparse.Namespace) -> dict[str, float]:
    return {"first": options.first, "between": options.between}


@dataclass(frozen=True)
class Server:
    name: str
    endpoint: Endpoint
    model: str
    pid: int | None  # of a process on this machine


def open_server(given: str, pids: Mapping[str, int], options: argparse.Namespace) -> Server:
    name, separator, url = given.partition("=")
    if not separator or "/" in name:
        name, url = given, given
    endpoint = Endpoint(url, options.key, options.timeout)
    pid = pids.get(name, pids.get("") if len(options.url) == 1 else None)
    return Server(name, endpoint, options.model or asyncio.run(model_of(endpoint)), pid)


def pids_of(options: argparse.Namespace) -> dict[str, int]:
    """By name of a server; "": of the only one."""
    found: dict[str, int] = {}
    for given in options.pid:
        name, _, number = given.rpartition("=")
        if not number.isdigit() or not Path(f"/proc/{number}/stat").exists():
            raise RequestError(f"--pid is {given!r}; the number of a process on this machine is needed", "pid")
        if not any(url.partition("=")[0] == name for url in options.url) and (name or len(options.url) > 1):
            raise RequestError(f"--pid is {given!r}; none of several servers has that name", "pid")
        found[name] = int(number)
    return found


# One server at one rate ---------------------------------------------------------------------------------------------
def measure(server: Server, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    jobs = jobs_of(options.mix, options.requests, options.seed)
    with progress(f"{server.name} at {rate:g}/s", options.requests * options.turns) as shown:
        start = time.perf_counter()
        load = Load(server, rate, options, shown)
        watch = None if server.pid is None else Watch(server.pid)
        replies = asyncio.run(load.run(jobs))
        others = None if watch is None else others_than(watch, server)
        seconds = max(time.perf_counter() - start, options.requests / rate)
    row = {"server": server.name, "model": server.model, "rate": rate, **summary(replies, seconds, options)}
    row["disturbed"] = others
    return row if options.turns == 1 else row | {"turns": by_turn(load.of_turn)}


def others_than(watch: Watch, server: Server) -> float | None:
    """The cores that neither this process nor the server used; None: the server has ended."""
    try:
        return round(watch.others(server.pid), 2)
    except OSError:
        return None


class Load:
    """Requests that come at random times, whatever became of those before."""

    def __init__(self, server: Server, rate: float, options: argparse.Namespace, shown: Progress) -> None:
        self._server, self._rate, self._options, self._shown = server, rate, options, shown
        self._rng = random.Random(f"{options.seed} arrivals {rate}")
        self._replies: list[Reply] = []
        self.of_turn: list[list[Reply]] = [[] for _ in range(options.turns)]
        self._failed_first = 0

    async def run(self, jobs: Sequence[Job]) -> list[Reply]:
        tasks: list[asyncio.Task[None]] = []
        start = time.perf_counter()
        try:
            for number, (due, job) in enumerate(zip(self._arrivals(len(jobs)), jobs, strict=True)):
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                if self._is_hopeless:
                    break
                tasks.append(asyncio.create_task(self._user(number, job)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return self._replies

    def _arrivals(self, count: int) -> list[float]:
        """A Poisson process of which it is known that so many come in `count` / rate seconds: independent times."""
        return sorted(self._rng.uniform(0, count / self._rate) for _ in range(count))

    @property
    def _is_hopeless(self) -> bool:
        return self._failed_first >= GIVE_UP and self._failed_first == len(self._replies)

    async def _user(self, number: int, job: Job) -> None:
        rng = random.Random(f"{self._options.seed} user {number}")
        messages: list[dict[str, str]] = []
        for turn in range(self._options.turns):
            text = words(rng, job.prompt_words if turn == 0 else max(4, job.prompt_words // 4))
            messages.append({"role": "user", "content": text})
            reply = await self._ask(messages, job.output_tokens)
            self._note(turn, reply)
            if reply.error is not None or turn + 1 == self._options.turns:
                return
            messages.append({"role": "assistant", "content": reply.text})
            await asyncio.sleep(rng.expovariate(1 / THINKING))

    async def _ask(self, messages: list[dict[str, str]], tokens: int) -> Reply:
        body: dict[str, Any] = {"model": self._server.model, "max_tokens": tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self._options.turns > 1:
            return await ask(self._server.endpoint, "chat/completions", body | {"messages": list(messages)})
        return await ask(self._server.endpoint, "completions", body | {"prompt": messages[0]["content"]})

    def _note(self, turn: int, reply: Reply) -> None:
        self._replies.append(reply)
        self.of_turn[turn].append(reply)
        self._failed_first += reply.error is not None and self._failed_first == len(self._replies) - 1
        failed = sum(one.error is not None for one in self._replies)
        self._shown(len(self._replies), f", {failed} failed" if failed else "")


def summary(replies: Sequence[Reply], seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    good = [reply for reply in replies if reply.error is None]
    first = [reply.first for reply in good if reply.first is not None]
    between = [reply.between for reply in good if reply.between is not None]
    met = [
        reply for reply in good
        if (reply.first or 0.0) <= options.first and (reply.between or 0.0) <= options.between
    ]  # fmt: skip
    return {
        "requests": len(replies),
        "failed": len(replies) - len(good),
        "errors": dict(Counter(reply.error for reply in replies if reply.error is not None)),
        "seconds": seconds,
        "goodput": len(met) / seconds,
        "met": len(met),
        "tokens_per_second": sum(reply.num_tokens for reply in good) / seconds,
        "first": {name: quantile(first, share) for name, share in SHARES.items()},
        "between": {name: quantile(between, share) for name, share in SHARES.items()},
        "total": {name: quantile([reply.ended for reply in good], share) for name, share in SHARES.items()},
    }


def by_turn(of_turn: Sequence[Sequence[Reply]]) -> list[dict[str, Any]]:
    """Of a chat's first turns, second turns, …: how long they waited. A later one finds the turns before in a cache,
    if the server has one."""
    found = []
    for turn, replies in enumerate(of_turn, 1):
        first = [reply.first for reply in replies if reply.error is None and reply.first is not None]
        quantiles = {name: quantile(first, share) for name, share in SHARES.items()}
        found.append({"turn": turn, "requests": len(replies), "first": quantiles})
    return found


SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


# Reporting ----------------------------------------------------------------------------------------------------------
def report(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    table = []
    for row in rows:
        errors = ", ".join(f"{count} × {text}" for text, count in row["errors"].items()) or "none"
        milliseconds = [None if value is None else 1000 * value for value in (
            row["first"]["p50"], row["first"]["p99"], row["between"]["p50"], row["between"]["p99"])]  # fmt: skip
        table.append([
            row["server"], row["rate"], row["requests"], row["goodput"], 100 * row["met"] / max(1, row["requests"]),
            row["tokens_per_second"], *milliseconds, row["disturbed"], errors,
        ])  # fmt: skip
    print(f"goodput: first token within {options.first:g} s and at most {1000 * options.between:g} ms between tokens")
    titles = ["", "rate/s", "requests", "goodput/s", "met, %", "tokens/s", "first p50, ms", "p99", "between p50, ms"]
    print_table([*titles, "p99", "others, cores", "failures"], table)
    turns = [
        [row["server"], row["rate"], each["turn"], each["requests"],
         *(None if each["first"][name] is None else 1000 * each["first"][name] for name in ("p50", "p99"))]
        for row in rows for each in row.get("turns", ())
    ]  # fmt: skip
    if turns:
        print("by turn of a chat")
        print_table(["", "rate/s", "turn", "requests", "first p50, ms", "p99"], turns)


def draw(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    title = f"goodput: first token in {options.first:g} s, {1000 * options.between:g} ms between"
    with figure(options.plot, title=title, x="requests a second that arrive", y="that met the targets") as axes:
        rates = sorted({row["rate"] for row in rows})
        axes.plot(rates, rates, linestyle=":", color="gray", label="all of them")
        for name in dict.fromkeys(row["server"] for row in rows):
            own = [row for row in rows if row["server"] == name]
            axes.plot([row["rate"] for row in own], [row["goodput"] for row in own], marker="o", label=name)



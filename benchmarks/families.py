"""Families of models beside llama.cpp: the same file of random weights at a real model's shape, in both servers.

    python -m benchmarks families                                 every model (twelve gigabytes pass through the cache)
    python -m benchmarks families lfm2-350m --only decode-512 --rounds 3

Rows: decoding and prefill behind 32, 512 and 4,096 tokens; the second turn of a chat until its first token, where the
first answer comes back whole (appended) and where a template has left out what was thought in it (stripped); eight
requests at once. Both engines get the same tokens from one client, and their turns alternate; a ratio is taken within a
round, and the median of the rounds is shown: above 1 is ours. Beside it stands how much of this machine's bandwidth
(decoding) or compute (prefill) ours reached, and for turns how many tokens each engine did not compute again.

A turn that other processes disturbed is made again (--tries). On a machine that others keep busy, --processor counts
each server's own processor seconds in place of seconds, with one thread, so that no thread waits for another one. The
system counts these in hundredths, so a fast model needs more tokens than usual (--steps).

Files lie in the cache directory and are removed in the end, unless they are to be kept (--keep). llama.cpp comes as a
package with its server into an environment of its own, which is made once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks.family_files import CONTEXT, STANDS, write
from benchmarks.serving import QUIET_CORES, SETTLE_SECONDS, Server, free_port
from unspool.bench import clients
from unspool.ceilings import Ceilings, ceilings
from unspool.config import EngineConfig
from unspool.machine import num_cores
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.costs import StepCosts, costs_of
from unspool.quiet import Watch, process_seconds
from unspool.weights.store import cache_dir

OURS, THEIRS = "unspool", "llama.cpp"
CONTEXTS = (32, 512, 4096)
STEPS, SLOTS = 32, 8
CHAT_WORDS, THOUGHT_WORDS, ANSWER_WORDS, QUESTION_WORDS = 1500, 96, 64, 32
BIAS = 100  # that keeps an answer to words which are one token each, so that its text is read back as the same tokens


@dataclass(frozen=True)
class Row:
    name: str
    unit: str
    measure: Callable[[Side, random.Random], Sample]

    def ratio(self, ours: float, theirs: float) -> float:
        return theirs / ours if self.unit == "s" else ours / theirs


@dataclass(frozen=True)
class Sample:
    value: float
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Side:
    """A server, and what it is asked."""

    def __init__(
        self,
        server: Server,
        vocabulary: range,
        words: dict[str, int],
        *,
        by_processor: bool = False,
        chat_words: int,
        steps: int = STEPS,
    ) -> None:
        self.server, self._vocabulary, self._words = server, vocabulary, words
        self._by_processor, self._chat_words, self._steps = by_processor, chat_words, steps

    def _now(self) -> float:
        """Seconds, or the server's processor seconds."""
        if not self._by_processor:
            return time.perf_counter()
        return process_seconds(Path(f"/proc/{self.server.pid}/stat").read_text())

    def decode(self, rng: random.Random, context: int) -> Sample:
        if self._by_processor:  # with its prompt, and the prompt without
            whole, _ = self._ask("/v1/completions", self._body(context, self._steps + 1, rng) | {"stream": False})
            prompt, _ = self._ask("/v1/completions", self._body(context, 1, rng) | {"stream": False})
            return Sample(self._steps / max(whole - prompt, 0.01))
        done = clients.drive(self.server.port, [self._body(context, self._steps, rng)], 1)
        arrivals = done.samples[0].arrivals
        return Sample((done.tokens - 1) / (arrivals[-1] - arrivals[0]))

    def prefill(self, rng: random.Random, context: int) -> Sample:
        seconds, _ = self._ask("/v1/completions", self._body(context, 1, rng) | {"stream": False})
        return Sample(context / seconds)

    def eight(self, rng: random.Random) -> Sample:
        began = self._now()
        done = clients.drive(self.server.port, [self._body(32, self._steps, rng) for _ in range(SLOTS)], SLOTS)
        return Sample(done.tokens / (self._now() - began) if self._by_processor else done.rate)

    def turn(self, rng: random.Random, is_stripped: bool) -> Sample:
        """Seconds to the first token of a chat's second answer."""
        messages = [{"role": "system", "content": "Answer the question."}, self._message(self._chat_words, rng)]
        bias = {str(id): BIAS for id in self._words.values()}
        first = {"max_tokens": THOUGHT_WORDS + ANSWER_WORDS, "logit_bias": bias, "ignore_eos": True}
        _, reply = self._chat(messages, **first)
        answer = reply["choices"][0]["message"]["content"]
        if is_stripped:
            answer = "".join(f" {word}" for word in answer.split()[THOUGHT_WORDS:])
        messages += [{"role": "assistant", "content": answer}, self._message(QUESTION_WORDS, rng)]
        seconds, reply = self._chat(messages, max_tokens=1)
        usage = reply["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Sample(seconds, usage["prompt_tokens"], cached)

    def _message(self, count: int, rng: random.Random) -> dict[str, str]:
        return {"role": "user", "content": "".join(rng.choices([*self._words], k=count))}

    def _chat(self, messages: list[dict[str, str]], **more: Any) -> tuple[float, dict[str, Any]]:
        own = {"cache_prompt": True} if self.server.more else {}
        return self._ask("/v1/chat/completions", {"messages": messages, "temperature": 0, **own, **more})

    def _body(self, context: int, max_tokens: int, rng: random.Random) -> dict[str, Any]:
        """Random ids, never the same twice: engines keep the prefixes that they computed."""
        prompt = rng.choices(self._vocabulary, k=context)
        fixed = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        return {**fixed, "stream_options": {"include_usage": True}, **self.server.more}

    def _ask(self, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        body.pop("stream_options", None)
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=1200)
        data = json.dumps(body).encode()
        began = self._now()
        connection.request("POST", path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        seconds = self._now() - began
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"{self.server.name} answered {response.status} {answer[:2000].decode()}")
        return seconds, json.loads(answer)


def rows() -> dict[str, Row]:
    rate = "tokens/s"
    found = [Row(f"decode-{context}", rate, partial(Side.decode, context=context)) for context in CONTEXTS]
    found += [Row(f"prefill-{context}", rate, partial(Side.prefill, context=context)) for context in CONTEXTS]
    found += [
        Row("turn-appended", "s", partial(Side.turn, is_stripped=False)),
        Row("turn-stripped", "s", partial(Side.turn, is_stripped=True)),
        Row("eight", rate, Side.eight),
    ]
    return {row.name: row for row in found}


# Measuring ----------------------------------------------------------------------------------------------------------
@dataclass
class Record:
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)  # by row and engine
    others: list[float] = field(default_factory=list)  # cores that others kept busy

    def median(self, row: str, engine: str) -> float:
        return statistics.median(sample.value for sample in self.samples[row][engine])

    def ratio(self, row: Row) -> float | None:
        of = self.samples[row.name]
        if THEIRS not in of:
            return None
        both = zip(of[OURS], of[THEIRS], strict=True)
        return statistics.median(row.ratio(ours.value, theirs.value) for ours, theirs in both)


def measure(sides: dict[str, Side], known: dict[str, Row], rounds: int, tries: int) -> Record:
    record, names = Record(), list(sides)
    for side in sides.values():
        side.prefill(random.Random("warm"), 64)
    for number in range(rounds):
        for name, row in known.items():
            for engine in names[number % len(names) :] + names[: number % len(names)]:
                done: list[tuple[float, Sample]] = []
                while len(done) < tries and (not done or done[-1][0] > QUIET_CORES):
                    time.sleep(SETTLE_SECONDS)
                    watch = Watch(sides[engine].server.pid)
                    sample = row.measure(sides[engine], random.Random(f"{name} {number} {len(done)}"))
                    done.append((watch.others(sides[engine].server.pid), sample))
                others, sample = min(done, key=lambda each: each[0])
                record.samples.setdefault(name, {}).setdefault(engine, []).append(sample)
                record.others.append(others)
        print(f"round {number + 1} is done", file=sys.stderr, flush=True)
    return record


@contextmanager
def servers(path: Path, options: argparse.Namespace) -> Iterator[dict[str, Server]]:
    started: dict[str, Server] = {}
    try:
        started[OURS] = our_server(path, options.threads)
        if not options.no_peer:
            started[THEIRS] = their_server(path, options)
        yield started
    finally:
        for server in started.values():
            server.stop()


def our_server(path: Path, threads: int) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "unspool", "serve", "-m", str(path), "--port", str(port), "--log", "off"]
    command += ["--threads", str(threads), "--drain", "0", "--kv-tokens", str(2 * CONTEXT)]
    return Server(OURS, command, port, {})


def their_server(path: Path, options: argparse.Namespace) -> Server:
    from benchmarks.llama_server import PACKAGE, command
    from benchmarks.peer import environment

    port = free_port()
    python = Path(options.peer_python) if options.peer_python else environment(cache_dir(), PACKAGE, [PACKAGE])
    started = command(python, path, port, SLOTS, 2 * CONTEXT, options.threads, cache=True, unified=True)
    return Server(THEIRS, started, port, {"cache_prompt": False})


def single_words(checkpoint: Checkpoint) -> dict[str, int]:
    """Texts of a space and a word that are one token, with its id."""
    tokenizer = checkpoint.tokenizer()
    texts = {id: tokenizer.token_text(id) for id in range(2000, 12_000)}
    words = {text: id for id, text in texts.items() if text.startswith(" ") and text[1:].isalpha() and text.islower()}
    return {text: id for text, id in [*words.items()][:256] if tokenizer.encode(text) == [id]}


# Reporting ----------------------------------------------------------------------------------------------------------
def share(row: str, value: float, costs: StepCosts, limits: Ceilings, steps: int) -> float | None:
    """Of the bandwidth while decoding, of the compute while reading a prompt."""
    kind, _, context = row.partition("-")
    if kind == "decode":
        behind = int(context) + steps / 2
        return value * (costs.weight_bytes() + costs.cache_bytes(behind)) / limits.bandwidth
    if kind == "prefill":
        return value / int(context) * costs.prefill_flops(int(context)) / limits.compute
    return None


def report(
    name: str, record: Record, known: dict[str, Row], costs: StepCosts, limits: Ceilings, steps: int
) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for row in known.values():
        of = record.samples[row.name]
        ours, ratio = record.median(row.name, OURS), record.ratio(row)
        entries[row.name] = {OURS: ours, "ratio": ratio, "share": share(row.name, ours, costs, limits, steps)}
        line = f"{name:<18}{row.name:<15}{ours:>10.3f}"
        if ratio is not None:
            entries[row.name][THEIRS] = record.median(row.name, THEIRS)
            line += f"{entries[row.name][THEIRS]:>10.3f} {row.unit:<9}{ratio:>7.2f}×"
        if entries[row.name]["share"] is not None:
            kind = "bandwidth" if row.name.startswith("decode") else "compute"
            line += f"   {100 * entries[row.name]['share']:.0f}% of {kind}"
        if row.unit == "s":
            cached = {engine: (samples[-1].cached_tokens, samples[-1].prompt_tokens) for engine, samples in of.items()}
            entries[row.name]["cached"] = cached
            line += "   cached " + ", ".join(f"{engine} {a:,} of {b:,}" for engine, (a, b) in cached.items())
        entries[row.name]["rounds"] = {engine: [each.value for each in samples] for engine, samples in of.items()}
        print(line, flush=True)
    disturbed = sum(cores > QUIET_CORES for cores in record.others)
    print(f"{disturbed} of {len(record.others)} turns were disturbed by other processes", flush=True)
    return {"rows": entries, "disturbed": [disturbed, len(record.others)]}


def run(name: str, path: Path, known: dict[str, Row], options: argparse.Namespace, limits: Ceilings) -> dict[str, Any]:
    if not path.exists():
        print(f"writing {path}", file=sys.stderr, flush=True)
        write(STANDS[name], path)
    try:
        checkpoint = open_checkpoint(path)
        words, vocabulary = single_words(checkpoint), range(300, checkpoint.config.vocab_size)
        with servers(path, options) as started:
            how = {"by_processor": options.processor, "chat_words": options.chat_words, "steps": options.steps}
            sides = {engine: Side(server, vocabulary, words, **how) for engine, server in started.items()}
            record = measure(sides, known, options.rounds, options.tries)
        costs = costs_of(checkpoint, EngineConfig().with_device_defaults("cpu"), "cpu")
        return report(name, record, known, costs, limits, options.steps) | {"file_bytes": path.stat().st_size}
    finally:
        if not options.keep:
            path.unlink()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks families", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known, cores = rows(), num_cores()
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(STANDS)} (all)")
    parser.add_argument("--only", choices=known, action="append", help="measure this row (repeatable)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--tries", type=int, default=3, help="of a turn that others disturb, at most (3)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"tokens that are decoded ({STEPS})")
    parser.add_argument("--threads", type=int, default=cores, help=f"threads of each engine ({cores})")
    parser.add_argument("--processor", action="store_true", help="count processor seconds, with one thread")
    parser.add_argument(
        "--chat-words", type=int, default=CHAT_WORDS, metavar="N", help=f"of a chat's first message ({CHAT_WORDS})"
    )
    parser.add_argument("--peer-python", metavar="PYTHON", help="a Python that has llama.cpp's server")
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp")
    parser.add_argument("--keep", action="store_true", help="leave the files in the cache directory")
    options = parser.parse_args(argv)
    if options.processor:
        options.threads = 1
    for option, least in (("rounds", 1), ("tries", 1), ("steps", 2), ("threads", 1), ("chat_words", 1)):
        if getattr(options, option) < least:
            parser.error(f"--{option.replace('_', '-')} is {getattr(options, option)}; it must be at least {least}")
    if unknown := [name for name in options.models if name not in STANDS]:
        parser.error(f"there is no model {unknown[0]!r}; there are {', '.join(STANDS)}")
    chosen = {name: row for name, row in known.items() if not options.only or name in options.only}
    folder = cache_dir() / "bench" / "families"
    folder.mkdir(parents=True, exist_ok=True)
    limits = ceilings("cpu", options.threads)
    found = {
        name: run(name, folder / f"{name}.gguf", chosen, options, limits) for name in options.models or STANDS
    }
    how = {name: getattr(options, name) for name in ("processor", "threads", "rounds", "chat_words", "steps")}
    about = {**how, "ceilings": limits.as_dict()}
    print(json.dumps({"benchmark": "families", **about, "models": found}))
    return 0

"""Whether the same request gives the same answer among others: greedily, and sampled with a seed.

    unspool bench determinism --url http://127.0.0.1:8000        any OpenAI-compatible server
    unspool bench determinism --runs 1000 --keep runs.jsonl      1,000 runs in this process, resumable
    unspool bench determinism --url a=http://… --url b=http://…  several servers, one after the other

One request is sent again and again while random other requests run beside it, as they do on a busy server. The result
is the number of distinct answers and where the first of them parts from the most frequent one. In this process an
answer is its token ids and the bits of every logprob; of a server it is the text. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from unspool.openai_client import Endpoint, Reply, ask, model_of
from unspool.reporting import Journal, Run, add_output, check_plot, figure, print_table, progress

PROMPT = "Write a short story about a lighthouse keeper, a storm and a letter that was never sent."
WORDS = ("river", "stone", "light", "winter", "house", "song", "paper", "garden", "train", "silver", "cloud", "bread")
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 11},
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "unspool bench determinism", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", action="append", metavar="[NAME=]URL", help="a server; repeatable (this process)")
    parser.add_argument("-m", "--model", help="of the server, or in this process (smollm2)")
    parser.add_argument("--key", help="the server's API key")
    parser.add_argument("--runs", type=int, default=100, help="of each mode (100)")
    parser.add_argument("-n", "--max-tokens", type=int, default=64, help="of an answer (64)")
    parser.add_argument("--at-once", type=int, default=8, help="runs in flight, and as many others (8)")
    parser.add_argument("--only", choices=list(MODES))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a request to a server (120)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    add_output(parser, resumable=True)
    options = parser.parse_args(argv)
    if min(options.runs, options.at_once, options.max_tokens) < 1:
        parser.error("--runs, --at-once and --max-tokens are at least 1")
    check_plot(options.plot)
    settings = {name: getattr(options, name) for name in ("url", "model", "runs", "max_tokens", "at_once", "only")}
    journal = Journal(options.keep, settings)
    run = Run("determinism", argv, plot=options.plot, is_here=not options.url)
    interrupted = False
    try:
        for name, side in sides(options):
            for mode in [options.only] if options.only else MODES:
                repeat(name, side, mode, options, journal)
    except KeyboardInterrupt:
        interrupted = True
        journal.note_interrupted()
    result = {"runs": options.runs, "at_once": options.at_once, "results": summaries(journal.items)}
    report(result["results"])
    if options.plot is not None and result["results"]:
        draw(result["results"], options)
    has_failed = any(not row["answers"] for row in result["results"]) or not result["results"]
    return run.finish(result, interrupted=interrupted, failed=has_failed and not interrupted)


def sides(options: argparse.Namespace) -> Iterator[tuple[str, Server | Here]]:
    if not options.url:
        yield "this process", Here(options)
        return
    for given in options.url:
        name, separator, url = given.partition("=")
        if not separator or "/" in name:
            name, url = given, given
        yield name, Server(Endpoint(url, options.key, options.timeout), options)


def repeat(name: str, side: Server | Here, mode: str, options: argparse.Namespace, journal: Journal) -> None:
    """The runs of one mode that the journal does not have, a crowd at a time."""
    done = sum(item["side"] == name and item["mode"] == mode for item in journal.items)
    seen: set[str] = set()
    failures = 0
    with progress(f"{name}, {mode}", options.runs) as shown:
        while done < options.runs:
            count = min(options.at_once, options.runs - done)
            answers = side.crowd(mode, count, random.Random(f"{mode} {done}"))
            for answer in answers:
                journal.add({"side": name, "mode": mode, **answer})
                seen.add(answer.get("answer", ""))
                failures += "error" in answer
            done += count
            shown(done, f", {len(seen)} distinct")
            if failures == done and done >= 3 * options.at_once:
                break  # nothing comes of it: say so instead of trying a thousand times


class Server:
    """Requests to a server, each over a connection of its own."""

    def __init__(self, endpoint: Endpoint, options: argparse.Namespace) -> None:
        self._endpoint, self._options = endpoint, options
        self._model = options.model or asyncio.run(model_of(endpoint))

    def crowd(self, mode: str, count: int, rng: random.Random) -> list[dict[str, Any]]:
        return asyncio.run(self._crowd(mode, count, rng))

    async def _crowd(self, mode: str, count: int, rng: random.Random) -> list[dict[str, Any]]:
        ours = [self._ask(PROMPT, self._options.max_tokens, MODES[mode], rng.uniform(0, 0.3)) for _ in range(count)]
        others = []
        for _ in range(rng.randrange(count + 1)):
            text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 120)))
            # Some share the beginning of the prompt: a server may reuse what it computed of it.
            text = PROMPT[: rng.randrange(len(PROMPT))] + text if rng.random() < 0.5 else text
            others.append(self._ask(text, rng.randrange(1, 24), {"temperature": 1}, rng.uniform(0, 0.3)))
        found = await asyncio.gather(*ours, *others)
        return [_outcome(reply) for reply in found[:count]]

    async def _ask(self, prompt: str, tokens: int, params: dict[str, Any], delay: float) -> Reply:
        await asyncio.sleep(delay)
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, **params}
        return await ask(self._endpoint, "completions", body)


def _outcome(reply: Reply) -> dict[str, Any]:
    return {"error": reply.error} if reply.error is not None else {"answer": reply.text}


class Here:
    """Requests to an engine in this process; logprobs are compared bit for bit."""

    def __init__(self, options: argparse.Namespace) -> None:
        from unspool.llm import LLM

        self._max_tokens = options.max_tokens
        self._llm = LLM(options.model or "smollm2", device=options.device, threads=options.threads, kv_tokens=8192)

    def crowd(self, mode: str, count: int, rng: random.Random) -> list[dict[str, Any]]:
        from unspool.params import SamplingParams

        params = SamplingParams(max_tokens=self._max_tokens, logprobs=3, ignore_eos=True, **MODES[mode])
        prompt, vocab_size = self._llm.encode(PROMPT), self._llm.checkpoint.config.vocab_size
        jobs = [(prompt, params)] * count
        for _ in range(rng.randrange(count + 1)):
            start = prompt[: rng.randrange(len(prompt))]
            text = start + [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 120))]
            jobs.append((text, SamplingParams(max_tokens=rng.randrange(1, 24), temperature=1, ignore_eos=True)))
        rng.shuffle(jobs)
        results = self._llm.generate([text for text, _ in jobs], [each for _, each in jobs])
        ours = [result for result, (_, each) in zip(results, jobs, strict=True) if each is params]
        return [{"answer": " ".join(map(_bits, result.tokens))} for result in ours]


def _bits(token: Any) -> str:
    """A token's id and, as hexadecimal digits, the bits of its logprob and of the best tokens'."""
    numbers = [token.logprob, *(logprob for _, logprob in token.top)]
    return f"{token.id}:{struct.pack(f'<{len(numbers)}d', *numbers).hex()}"


# Reporting ----------------------------------------------------------------------------------------------------------
def summaries(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for item in items:
        found.setdefault((item["side"], item["mode"]), []).append(item)
    return [{"side": side, "mode": mode, **summary(each)} for (side, mode), each in found.items()]


def summary(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    answers = Counter(item["answer"] for item in items if "answer" in item)
    errors = Counter(item["error"] for item in items if "error" in item)
    common = answers.most_common()
    parting = [first_difference(common[0][0], other) for other, _ in common[1:]]
    return {
        "runs": len(items),
        "answers": answers.total(),
        "distinct": len(answers),
        "most_frequent": common[0][1] if common else 0,
        "first_divergence": min(parting) if parting else None,  # words of the answer that are still the same
        "divergences": sorted(parting),
        "counts": {hashlib.sha256(text.encode()).hexdigest()[:16]: count for text, count in common},
        "errors": dict(errors),
    }


def first_difference(one: str, other: str) -> int:
    """How many words (in this process: tokens) two answers share from the beginning."""
    ours, theirs = one.split(" "), other.split(" ")
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    return min(len(ours), len(theirs)) if same is None else same


def report(results: Sequence[dict[str, Any]]) -> None:
    rows = []
    for row in results:
        share = 100 * row["most_frequent"] / row["answers"] if row["answers"] else None
        errors = ", ".join(f"{count} × {text}" for text, count in row["errors"].items()) or "none"
        rows.append([row["side"], row["mode"], row["answers"], row["distinct"], share, row["first_divergence"], errors])
    print_table(["", "mode", "answers", "distinct", "most frequent, %", "first differs after", "failures"], rows)


def draw(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    with figure(options.plot, title=f"{options.runs:,} runs of one request", x="", y="distinct answers") as axes:
        names = [f"{row['side']}\n{row['mode']}" for row in results]
        bars = axes.bar(names, [row["distinct"] for row in results])
        axes.bar_label(bars)

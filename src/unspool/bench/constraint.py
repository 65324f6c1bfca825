"""What a constraint costs a step: the mask of what is allowed, the check of one token, following it.

Each workload is an answer that its constraint accepts, followed token by token as an engine does: `check` asks about
the answer's own token (what happens when the model's choice is fine), `mask` builds the full mask (what happens when
it is not, or a filter must know). The first answer meets a cold lexer, the others a warm one. A step's time is the
thread's own, so that others on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from unspool.bench.walk import Dice, allowed
from unspool.reporting import Run
from unspool.sampling.constraint import Matcher, compile_constraint
from unspool.sampling.constraint.vocabulary import Vocabulary
from unspool.text.tokenizer import Tokenizer, from_directory, from_gguf

DECODE_STEP_US = 4000.0  # SmolLM2 on two cores of a laptop; a constraint may cost a twentieth
_SENTENCES = (
    "The ferry leaves at seven; bring the blue folder and both keys.",
    "Naïve café owners in São Paulo sold 1,204 cups of crème brûlée.",
    'She said "later", closed the book\n\tand walked home through the rain.',
    "数据在两个核心上以每秒一百六十个词元的速度流动。",
)
_ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "title": {"type": "string", "maxLength": 200},
        "kind": {"enum": ["note", "task", "event"]},
        "day": {"type": "string", "format": "date"},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["id", "title", "kind", "day", "score", "tags"],
    "additionalProperties": False,
}
_GRAMMAR = """
start: statement+
statement: NAME " = " sum ";\\n"
sum: product ((" + " | " - ") product)*
product: atom ((" * " | " / ") atom)*
atom: NAME | NUMBER | "(" sum ")"
NAME: /[a-z_][a-z0-9_]{0,20}/
NUMBER: /[0-9]+(\\.[0-9]+)?/
"""


def workloads() -> dict[str, tuple[str, Any, list[str]]]:
    """Name: kind and value of the constraint, answers that it accepts."""
    items = [
        {
            "id": number,
            "title": _SENTENCES[number % len(_SENTENCES)],
            "kind": ("note", "task", "event")[number % 3],
            "day": f"2024-0{number % 9 + 1}-1{number % 10}",
            "score": number / 20,
            "tags": ["alpha", f"beta {number}"][: number % 3],
        }
        for number in range(12)
    ]
    dumped = [_compact(items[first : first + 4]) for first in (0, 4, 8)]
    loose = [_compact({"answer": item, "items": items[:2]}) for item in items[:4]]
    program = "total = (alpha + 12.5) * beta_2;\nratio = total / 3 - (x + y) * 0.25;\n" * 4
    title = "Some Words " * 15 + "2024-02-29"
    choices = ["strongly agree", "agree", "neutral", "disagree", "strongly disagree"]
    return {
        "json_schema": ("json_schema", {"type": "array", "items": _ITEM}, dumped),
        "json_object": ("json_object", None, loose),
        "regex": ("regex", r"(?:[A-Z][a-z]+ ){3,40}[0-9]{4}-[0-9]{2}-[0-9]{2}", [title] * 3),
        "choice": ("choice", choices, choices),
        "grammar": ("grammar", _GRAMMAR, [program] * 3),
    }


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def follow(root: Matcher, dice: Dice, text: str, how: str) -> list[float]:
    """Microseconds of each step. Tokens are those that the constraint allows of the text, the longest each time."""
    tokens = dice.cut(root.fork(), text.encode())
    matcher, times = root.fork(), []
    for token in tokens:
        start = time.thread_time_ns()
        if how == "check":
            matcher.check(token)
        else:
            matcher.mask()
        matcher.accept(token)
        times.append((time.thread_time_ns() - start) / 1e3)
    return times


def summary(times: list[float]) -> dict[str, float]:
    return {
        "mean": round(float(np.mean(times)), 1),
        "p50": round(float(np.median(times)), 1),
        "p99": round(float(np.percentile(times, 99)), 1),
        "max": round(float(np.max(times)), 1),
    }


def measure(tokenizer: Tokenizer) -> dict[str, Any]:
    start = time.perf_counter()
    Vocabulary(tokenizer)
    report: dict[str, Any] = {"tokens": tokenizer.vocab_size, "build_s": round(time.perf_counter() - start, 3)}
    dice = Dice(tokenizer)
    report["workloads"] = {}
    for name, (kind, value, answers) in workloads().items():
        constraint = SimpleNamespace(kind=kind, value=value)
        compile_constraint(SimpleNamespace(kind="regex", value="warm"), tokenizer)
        start = time.perf_counter()
        root = compile_constraint(constraint, tokenizer)
        compiled = (time.perf_counter() - start) * 1e3
        cold = follow(root, dice, answers[0], "mask")
        warm = [time for answer in answers for time in follow(root, dice, answer, "mask")]
        checks = [time for answer in answers for time in follow(root, dice, answer, "check")]
        report["workloads"][name] = {
            "compile_ms": round(compiled, 2),
            "forced": round(_forced_share(root, dice, answers[0]), 3),
            "cold_us": summary(cold),
            "mask_us": summary(warm),
            "check_us": summary(checks),
        }
    report["dice"] = summary(_random_steps(tokenizer, dice))
    return report


def _forced_share(root: Matcher, dice: Dice, text: str) -> float:
    """The share of an answer's tokens that needs no step of the model."""
    tokens, matcher, forced, at = dice.cut(root.fork(), text.encode()), root.fork(), 0, 0
    while at < len(tokens):
        run = matcher.forced()
        forced += len(run)
        for token in run or tokens[at : at + 1]:
            matcher.accept(token)
            at += 1
    return forced / len(tokens)


def _random_steps(tokenizer: Tokenizer, dice: Dice) -> list[float]:
    """Masks along answers that no model would give, where little is warm."""
    times = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        matcher = compile_constraint(SimpleNamespace(kind="json_schema", value=_ITEM), tokenizer)
        for length in range(200):
            start = time.thread_time_ns()
            mask = matcher.mask()
            spent = time.thread_time_ns() - start
            token = dice.roll(allowed(mask, tokenizer.vocab_size), length / 3, rng)
            start = time.thread_time_ns()
            matcher.accept(token)
            times.append((spent + time.thread_time_ns() - start) / 1e3)
            if token in tokenizer.eos_ids:
                break
    return times


def load_tokenizer(source: str) -> Tokenizer:
    from unspool.weights.gguf import open_gguf
    from unspool.weights.store import resolve

    path = Path(source) if Path(source).exists() else resolve(source)
    return from_directory(path) if path.is_dir() else from_gguf(open_gguf(path).metadata)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="unspool bench constraint", description=__doc__)
    parser.add_argument(
        "model", nargs="*", default=["smollm2"], help="GGUF files, model directories or names (smollm2)"
    )
    options = parser.parse_args(argv)
    run = Run("constraint", argv)
    report: dict[str, Any] = {}
    for source in options.model:
        found = report[Path(source).name] = measure(load_tokenizer(source))
        print(f"{source}: {found['tokens']:,} tokens, built in {found['build_s']} s; µs a step (mean, p99)")
        for name, row in found["workloads"].items():
            cost = row["mask_us"]["mean"] / DECODE_STEP_US
            print(
                f"{name:>12}  mask {row['mask_us']['mean']:7.1f} {row['mask_us']['p99']:7.1f}  "
                f"cold {row['cold_us']['mean']:7.1f} {row['cold_us']['p99']:7.1f}  "
                f"check {row['check_us']['mean']:6.1f} {row['check_us']['p99']:6.1f}  "
                f"forced {row['forced']:4.0%}  compile {row['compile_ms']:6.2f} ms  {cost:.2%} of a 4 ms step"
            )
        print(f"{'dice':>12}  mask {found['dice']['mean']:7.1f} {found['dice']['p99']:7.1f}")
    return run.finish({"models": report})

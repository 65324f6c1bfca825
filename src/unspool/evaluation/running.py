"""Options and models that the commands of `unspool eval` have in common."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from unspool.weights.store import resolve

if TYPE_CHECKING:
    from unspool.llm import LLM


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=count_of, metavar="N", help="the first N items of each task alone")
    parser.add_argument("--seeds", type=count_of, default=3, metavar="K", help="answers to an item, sampled (3)")
    parser.add_argument("--max-tokens", type=count_of, metavar="N", help="of an answer (the task's own)")


def count_of(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return value


def seeds_of(options: argparse.Namespace) -> list[int]:
    return list(range(1, options.seeds + 1))


def open_model(options: argparse.Namespace) -> LLM:
    from unspool.llm import LLM
    from unspool.models.random import stand_in

    model = stand_in(options.random) if options.random else resolve(options.model)
    return LLM(model, device=options.device, threads=options.threads)

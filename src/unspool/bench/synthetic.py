"""A drafter of known acceptance on random weights: what speculation gives beside what the formula says it must.

Plain answers are taken first. Then a drafter that knows them guesses each token right with a given chance a, decided by
its position alone, and answers are made again with drafts of fixed lengths k and of the length that the engine chooses.
A round with k guesses makes 1 + a + … + a^k tokens for the price of a step of k + 1 rows, so the formula's speed-up is
that sum times cost(1) / cost(k + 1), with costs measured in the same run at the same context.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.cache.blocks import borrowed
from unspool.config import EngineConfig
from unspool.drafter import BaseDrafter, DraftContext
from unspool.models.shapes import SHAPES
from unspool.params import SamplingParams
from unspool.plan import Plan, Work
from unspool.reporting import progress
from unspool.speculate.policy import DraftPolicy
from unspool.speculate.protocols import Branch
from unspool.speculate.speculation import Guess
from unspool.speculate.timing import step_times

if TYPE_CHECKING:
    from unspool.engine.engine import Engine
    from unspool.models.checkpoint import Checkpoint

Prompt = tuple[int, ...]


class Synthetic(BaseDrafter):
    """Knows the answers, and says the right token with a given chance: the same places every time."""

    name = "synthetic"

    def __init__(self, answers: Mapping[Prompt, Sequence[int]], chance: float, vocab_size: int) -> None:
        self._says: dict[Prompt, list[int]] = {}
        for index, (prompt, answer) in enumerate(answers.items()):
            is_right = np.random.default_rng(index).random(len(answer)) < chance
            wrong = (np.array(answer) + 1) % vocab_size
            self._says[prompt] = np.where(is_right, answer, wrong).tolist()
        self._known: dict[int, list[int]] = {}

    def propose(self, contexts: Sequence[DraftContext], counts: Sequence[int]) -> list[list[int]]:
        drafts = []
        for context, count in zip(contexts, counts, strict=True):
            if context.number not in self._known:
                self._known[context.number] = self._says[tuple(context.tokens[: context.num_prompt])]
            at = len(context.tokens) - context.num_prompt
            drafts.append(self._known[context.number][at : at + count])
        return drafts

    def seconds(self, count: int) -> float:
        return 0.0

    def forget(self, number: int) -> None:
        self._known.pop(number, None)


# Work ---------------------------------------------------------------------------------------------------------------
def make_engine(args: argparse.Namespace) -> Engine:
    from unspool.engine.engine import Engine

    is_cuda = args.device == "cuda"
    tokens = max(args.at_once) * (args.context + args.max_tokens + 64)
    engine = EngineConfig(
        device=args.device,
        block_size=128 if is_cuda else 32,
        kv_tokens=-(-tokens // 128) * 128 + 128 * max(args.at_once),
        step_tokens=4096 if is_cuda else 512,
        chunk_tokens=4096 if is_cuda else 512,
        prefix_cache=False,
    )
    return Engine(_checkpoint(args), engine)


def _checkpoint(args: argparse.Namespace) -> Checkpoint:
    if args.device == "cuda":
        from unspool.models.random import shared_checkpoint

        return shared_checkpoint(SHAPES[args.random])
    from unspool.models.random import random_checkpoint

    return random_checkpoint(SHAPES[args.random], format="q4_1")


def answer(
    engine: Engine, prompts: Sequence[Prompt], args: argparse.Namespace
) -> tuple[dict[Prompt, list[int]], float]:
    """All prompts at once: their answers, and tokens a second from the first token of all to the last."""
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=1, ignore_eos=True)
    ids = {engine.add(prompt, params): prompt for prompt in prompts}
    answers: dict[Prompt, list[int]] = {prompt: [] for prompt in prompts}
    first = time.perf_counter()
    num_first = 0
    while engine.has_work:
        for event in engine.step():
            answers[ids[event.request]] += [token.id for token in getattr(event, "tokens", ())]
        if not num_first and all(answers.values()):
            first, num_first = time.perf_counter(), sum(map(len, answers.values()))
    seconds = time.perf_counter() - first
    return answers, (sum(map(len, answers.values())) - num_first) / seconds


def step_seconds(engine: Engine, num_sequences: int, rows: int, context: int, rounds: int = 20) -> float:
    """A step of so many sequences with so many rows each behind a context, waited for: the median."""
    with borrowed(engine.scheduler.tables.groups, num_sequences, context, rows) as held:
        works = (
            Work(i, context, (1,) * rows, table, rows, rows, others=tuple(others))
            for i, (table, *others) in enumerate(held)
        )
        times = step_times(engine.runner, Plan(tuple(works)), rounds + 2)
    return statistics.median(times[2:])


class FixedLength(DraftPolicy):
    """Drafts of one length for every request, whether they pay or not: for measurements, and to test them all."""

    def __init__(self, adaptive: DraftPolicy, length: int) -> None:
        super().__init__(lambda: adaptive.costs)
        self._fixed = length

    def can_pay(self, drafter: BaseDrafter, num_rows: int) -> bool:
        return True

    def is_worth_asking(self, branch: Branch, drafter: BaseDrafter, num_rows: int, num_others: int) -> bool:
        return True

    def max_length(self, branch: Branch, drafter: BaseDrafter, num_rows: int, num_others: int) -> int:
        return min(self._fixed, branch.max_output - len(branch.output) - 1)

    def should_continue(
        self, branch: Branch, drafter: BaseDrafter, num_rows: int, num_others: int, confidences: Sequence[int]
    ) -> bool:
        return True

    def length(self, branch: Branch, drafter: BaseDrafter, guess: Guess, num_rows: int) -> int:
        room = branch.max_output - len(branch.output) - branch.request.num_pending - 1
        return max(0, min(self._fixed, room, len(guess.tokens)))


def fix_length(engine: Engine, length: int) -> None:
    """Every draft of this engine has this length from now on."""
    engine.speculation.policy = FixedLength(engine.speculation.policy, length)


def tokens_a_round(chance: float, length: int) -> float:
    return sum(chance**place for place in range(length + 1))


# The run ------------------------------------------------------------------------------------------------------------
def measure(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Each number of requests at once; `result` has what is done."""
    engine = make_engine(args)
    result |= {"shape": args.random, "device": engine.ops.kernel_set, "temperature": args.temperature, "rows": []}
    for at_once in args.at_once:
        result["rows"].append(compare(engine, at_once, args))


def compare(engine: Engine, at_once: int, args: argparse.Namespace) -> dict[str, Any]:
    """Plain, then every chance with every length; the first round of all prepares what the others time."""
    speculation, vocab_size = engine.speculation, engine.checkpoint.config.vocab_size
    adaptive = speculation.policy
    prompts = [
        tuple(np.random.default_rng(100 + i).integers(0, vocab_size, args.context).tolist()) for i in range(at_once)
    ]
    lengths: list[int | None] = [*args.lengths, None]
    cost = {
        length: step_seconds(engine, at_once, 1 + length, args.context + args.max_tokens // 2)
        for length in (0, *args.lengths)
    }
    rates: dict[tuple[float, int | None] | None, list[float]] = {None: []}
    tallies: dict[tuple[float, int | None], Any] = {}
    expected: dict[Prompt, list[int]] = {}
    with progress(f"{at_once} at once", args.rounds + 1) as shown:
        for round_number in range(args.rounds + 1):
            speculation.drafters = {}
            expected, rate = answer(engine, prompts, args)
            rates[None] += [rate] if round_number else []
            for chance in args.synthetic:
                for length in lengths:
                    speculation.drafters = {"synthetic": Synthetic(expected, chance, vocab_size)}
                    speculation.policy = adaptive if length is None else FixedLength(adaptive, length)
                    speculation.total = type(speculation.total)()
                    found, rate = answer(engine, prompts, args)
                    if found != expected:
                        raise AssertionError(f"speculation changed an answer (chance {chance}, length {length})")
                    rates.setdefault((chance, length), []).extend([rate] if round_number else [])
                    tallies[chance, length] = speculation.total.as_dict()
            shown(round_number + 1)
    speculation.drafters, speculation.policy = {}, adaptive
    return report(at_once, rates, tallies, cost, args)


def report(
    at_once: int,
    rates: Mapping[Any, Sequence[float]],
    tallies: Mapping[Any, Any],
    cost: Mapping[int, float],
    args: argparse.Namespace,
) -> dict[str, Any]:
    plain = statistics.median(rates[None])
    print(f"{at_once} at once, plain: {plain:.1f} tokens/s ({1000 * at_once / plain:.3f} ms a step)")
    costs = ", ".join(f"{1 + length}: {1000 * seconds:.3f}" for length, seconds in cost.items())
    print(f"a step waited for, ms by rows of each: {costs}")
    rows = []
    for key, values in rates.items():
        if key is None:
            continue
        chance, length = key
        measured = statistics.median(b / a for a, b in zip(rates[None], values, strict=True))
        formula = {k: tokens_a_round(chance, k) * cost[0] / cost[k] for k in cost}
        by_formula = max(formula.values()) if length is None else formula[length]
        tally = tallies[key]
        made = 1 + tally["mean_accepted"]
        note = "the best of these" if length is None else f"{made * cost[0] / cost[length]:.2f} with the tokens made"
        print(
            f"  right {chance:.2f}  length {'own' if length is None else length:>3}   measured {measured:5.2f}   "
            f"formula {by_formula:5.2f} ({note})   {tally['accepted']:,} of {tally['drafted']:,} guesses right, "
            f"{made:.2f} tokens a round"
        )
        row = {"chance": chance, "length": length, "measured": measured, "formula": by_formula}
        rows.append(row | {"drafted": tally["drafted"], "accepted": tally["accepted"], "tokens_a_round": made})
    return {"at_once": at_once, "plain": plain, "cost_ms": {1 + k: 1000 * s for k, s in cost.items()}, "drafts": rows}

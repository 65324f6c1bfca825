"""The table that `unspool explain` prints: one row a token, one column a stage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unspool.cli.terminal import harmless, styled, width

if TYPE_CHECKING:
    from unspool.llm import LLM
    from unspool.results import Result
    from unspool.sampling.trace import StageTrace, StepTrace

LONGEST_TOKEN = 16
GAP = "  "


@dataclass(frozen=True)
class Cell:
    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    title: str
    cells: Sequence[Cell]
    right: bool = True

    @property
    def size(self) -> int:
        return max([len(self.title), *(len(cell.text) for cell in self.cells)])

    def pad(self, text: str) -> str:
        return text.rjust(self.size) if self.right else text.ljust(self.size)


def print_table(llm: LLM, result: Result, num_alternatives: int) -> None:
    """On a terminal the line's rest is for the alternatives; in a pipe lines are as long as they are."""
    steps: list[StepTrace] = [token.trace for token in result.tokens if token.trace is not None]
    columns = _columns(llm, steps, greedy=result.params.greedy)
    room = width() if sys.stdout.isatty() else 10_000
    if sum(column.size + len(GAP) for column in columns) > room:
        columns.pop()
    room -= sum(column.size + len(GAP) for column in columns)
    titles = GAP.join([*(column.pad(column.title) for column in columns), "instead"])
    print(styled(titles.rstrip(), "dim", sys.stdout))
    for index, step in enumerate(steps):
        cells = []
        for column in columns:
            cell = column.cells[index]
            cells.append(styled(column.pad(cell.text), cell.style, sys.stdout))
        print(GAP.join([*cells, _others(llm, step, num_alternatives, room)]).rstrip())


def _columns(llm: LLM, steps: Sequence[StepTrace], *, greedy: bool) -> list[Column]:
    def colour(step: StepTrace) -> str:
        p = step.raw_probability
        return "green" if p >= 0.5 else "yellow" if p >= 0.1 else "red"

    numbers = [Cell(str(number), "dim") for number in range(1, len(steps) + 1)]
    tokens = [Cell(quoted(spelling(llm, step.token)), f"bold {colour(step)}") for step in steps]
    ranks = [Cell(f"{step.raw_rank:,}", "" if step.raw_rank == 1 else "bold") for step in steps]
    columns = [
        Column("", numbers),
        Column("token", tokens, right=False),
        Column("p", [Cell(percent(step.raw_probability), colour(step)) for step in steps]),
        Column("rank", ranks),
        Column("entropy", [Cell(f"{step.entropy_bits:.2f}") for step in steps]),
    ]
    for name in dict.fromkeys(stage.name for step in steps for stage in step.stages):
        columns.append(_stage_column(name, steps))
    title = "best logit" if greedy else "draw: logit + noise"
    columns.append(Column(title, [Cell(_draw(step)) for step in steps]))
    return [*columns, Column("ahead of", [Cell(_next(llm, step)) for step in steps], right=False)]


def _stage_column(name: str, steps: Sequence[StepTrace]) -> Column:
    """A stage that removes tokens tells how many it left and their mass; one that moves logits, the chosen one's."""
    found = [next((stage for stage in step.stages if stage.name == name), None) for step in steps]
    value = next(stage.value for stage in found if stage is not None)
    removes = any(stage.mass < 1 for stage in found if stage is not None) or name not in _MOVES
    shown = [Cell("–", "dim") if stage is None else Cell(_stage_text(stage, removes)) for stage in found]
    return Column(f"{name} {_value(value)}".rstrip(), shown)


_MOVES = frozenset({"bias", "repetition", "frequency", "presence", "dry", "temperature"})


def _stage_text(stage: StageTrace, removes: bool) -> str:
    if removes:
        return f"{stage.survivors:,} {percent(stage.mass)}"
    chosen = stage.tokens[0]
    if chosen.before == chosen.after:
        return f"{chosen.after:.2f}"
    return f"{chosen.before:.2f}→{chosen.after:.2f}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, int | str) else ""


def _draw(step: StepTrace) -> str:
    best = step.candidates[0]
    return f"{best.logit:.2f}" if step.greedy else f"{best.logit:.2f} {best.gumbel:+.2f} = {best.score:.2f}"


def _next(llm: LLM, step: StepTrace) -> str:
    if len(step.candidates) < 2:
        return "nothing"
    second = step.candidates[1]
    return f"{quoted(spelling(llm, second.token))} {second.score:.2f}"


def _others(llm: LLM, step: StepTrace, count: int, room: int) -> str:
    """The likeliest tokens that were not chosen, as many as there is room for; what removed one comes with it."""
    parts, used = [], 0
    for token, probability in [each for each in step.alternatives if each[0] != step.token][:count]:
        removed = _removed_by(step, token)
        text = f"{quoted(spelling(llm, token))} {percent(probability)}" + (f" ✗{removed}" if removed else "")
        used += len(text) + len(GAP)
        if used > room + len(GAP):
            break
        parts.append(styled(text, "dim" if removed else "", sys.stdout))
    return GAP.join(parts)


def _removed_by(step: StepTrace, token: int) -> str | None:
    for stage in step.stages:
        if any(effect.token == token and not effect.alive for effect in stage.tokens):
            return stage.name
    return None


def spelling(llm: LLM, token: int) -> str:
    """A token's text; of half a character, its bytes."""
    return llm.tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")


def quoted(text: str) -> str:
    """A token as a column can hold it: its spaces and line ends seen, cut where it is long."""
    shown = harmless(text.replace("\n", "\\n").replace("\t", "\\t"))
    if len(shown) > LONGEST_TOKEN:
        shown = shown[: LONGEST_TOKEN - 1] + "…"
    return f'"{shown}"' if "'" in shown else f"'{shown}'"


def percent(p: float) -> str:
    if 0 < p < 0.0005:
        return "<0.1%"
    return "100%" if p >= 0.9995 else f"{100 * p:.1f}%"

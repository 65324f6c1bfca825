"""The output of `unspool explain`: a table with a row per token and a column per stage, or a paragraph per token if the
terminal is too narrow."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unspool.cli.terminal import harmless, styled, width
from unspool.cli.wrapping import fold, num_cells, pad
from unspool.records import record

if TYPE_CHECKING:
    from unspool.llm import LLM
    from unspool.results import Result
    from unspool.sampling.trace import StageTrace, StepTrace

LONGEST_TOKEN = 16
GAP = "  "


@record(frozen=True)
class Cell:
    text: str
    style: str = ""


@record(frozen=True)
class Column:
    title: str
    cells: Sequence[Cell]
    right: bool = True
    label: str = "{title} {text}"  # of a cell outside the table

    @property
    def size(self) -> int:
        return max(num_cells(text) for text in (self.title, *(cell.text for cell in self.cells)))

    def pad(self, text: str) -> str:
        return pad(text, self.size, right=self.right)

    def labelled(self, index: int) -> Cell:
        cell = self.cells[index]
        return Cell(self.label.format(title=self.title, text=cell.text), cell.style)


def print_table(llm: LLM, result: Result, num_alternatives: int) -> None:
    steps: list[StepTrace] = [token.trace for token in result.tokens if token.trace is not None]
    columns = _columns(llm, steps, greedy=result.params.greedy)
    others = [_others(llm, step, num_alternatives) for step in steps]
    used = sum(column.size + len(GAP) for column in columns)
    needed = max((num_cells(cells[0].text) for cells in others if cells), default=0)
    # Lines to a pipe may have any length.
    room = width() - 1 if sys.stdout.isatty() else 1_000_000
    lines = _rows(columns, others, room - used) if used + needed <= room else _paragraphs(columns, others, room)
    for line in lines:
        print(line.rstrip())


def _rows(columns: Sequence[Column], others: Sequence[Sequence[Cell]], room: int) -> list[str]:
    """The table. The rest of each line has as many alternatives as fit."""
    head = [column.pad(column.title) for column in columns] + (["instead"] if any(others) else [])
    lines = [styled(GAP.join(head), "dim", sys.stdout)]
    for index, alternatives in enumerate(others):
        cells = [(column, column.cells[index]) for column in columns]
        row = [styled(column.pad(cell.text), cell.style, sys.stdout) for column, cell in cells]
        left = room
        for cell in alternatives:
            left -= num_cells(cell.text)
            if left < 0:
                break
            row.append(styled(cell.text, cell.style, sys.stdout))
            left -= len(GAP)
        lines.append(GAP.join(row))
    return lines


def _paragraphs(columns: Sequence[Column], others: Sequence[Sequence[Cell]], limit: int) -> list[str]:
    lines = []
    numbers, *rest = columns
    indent = numbers.size + len(GAP)
    for index, alternatives in enumerate(others):
        cells = [column.labelled(index) for column in rest]
        cells += [Cell(f"instead {cell.text}", cell.style) for cell in alternatives[:1]]
        packed = _pack([*cells, *alternatives[1:]], limit - indent)
        number = styled(numbers.pad(numbers.cells[index].text), numbers.cells[index].style, sys.stdout)
        lines += [(number + GAP if place == 0 else " " * indent) + line for place, line in enumerate(packed)]
    return lines


def _pack(cells: Sequence[Cell], limit: int) -> list[str]:
    """Joins cells into lines of at most `limit` columns; only a longer cell is broken."""
    lines: list[str] = []
    used = limit
    for cell in cells:
        for text in fold(cell.text, limit).split("\n"):
            size = num_cells(text)
            if used + len(GAP) + size > limit:
                lines.append("")
                used = 0
            else:
                lines[-1] += GAP
                used += len(GAP)
            lines[-1] += styled(text, cell.style, sys.stdout)
            used += size
    return lines


def _columns(llm: LLM, steps: Sequence[StepTrace], *, greedy: bool) -> list[Column]:
    def colour(step: StepTrace) -> str:
        p = step.raw_probability
        return "green" if p >= 0.5 else "yellow" if p >= 0.1 else "red"

    numbers = [Cell(str(number), "dim") for number in range(1, len(steps) + 1)]
    tokens = [Cell(quoted(spelling(llm, step.token)), f"bold {colour(step)}") for step in steps]
    ranks = [Cell(f"{step.raw_rank:,}", "" if step.raw_rank == 1 else "bold") for step in steps]
    columns = [
        Column("", numbers),
        Column("token", tokens, right=False, label="{text}"),
        Column("p", [Cell(percent(step.raw_probability), colour(step)) for step in steps], label="{text}"),
        Column("rank", ranks),
        Column("entropy", [Cell(f"{step.entropy_bits:.2f}") for step in steps], label="{title} {text} bits"),
    ]
    for name in dict.fromkeys(stage.name for step in steps for stage in step.stages):
        columns.append(_stage_column(name, steps))
    title = "best logit" if greedy else "draw: logit + noise"
    columns.append(Column(title, [Cell(_draw(step)) for step in steps], label=f"{title.split(':')[0]} {{text}}"))
    return [*columns, Column("ahead of", [Cell(_next(llm, step)) for step in steps], right=False)]


def _stage_column(name: str, steps: Sequence[StepTrace]) -> Column:
    """For a stage that removes tokens: how many are left, and their mass; for one that changes logits: the chosen
    one's."""
    found = [next((stage for stage in step.stages if stage.name == name), None) for step in steps]
    value = next(stage.value for stage in found if stage is not None)
    removes = any(stage.mass < 1 for stage in found if stage is not None) or name not in _MOVES
    shown = [Cell("–", "dim") if stage is None else Cell(_stage_text(stage, removes)) for stage in found]
    label = "{title} leaves {text}" if removes else "{title}: {text}"
    return Column(f"{name} {_value(value)}".rstrip(), shown, label=label)


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


def _others(llm: LLM, step: StepTrace, count: int) -> list[Cell]:
    """The likeliest tokens that were not chosen, each with the stage that removed it."""
    cells = []
    for token, probability in [each for each in step.alternatives if each[0] != step.token][:count]:
        removed = _removed_by(step, token)
        text = f"{quoted(spelling(llm, token))} {percent(probability)}" + (f" ✗{removed}" if removed else "")
        cells.append(Cell(text, "dim" if removed else ""))
    return cells


def _removed_by(step: StepTrace, token: int) -> str | None:
    for stage in step.stages:
        if any(effect.token == token and not effect.alive for effect in stage.tokens):
            return stage.name
    return None


def spelling(llm: LLM, token: int) -> str:
    """A token's text, or its bytes if it is part of a character."""
    return llm.tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")


def quoted(text: str) -> str:
    """A token for a column: with visible spaces and line ends, shortened if it is long."""
    shown = harmless(text.replace("\n", "\\n").replace("\t", "\\t"))
    if len(shown) > LONGEST_TOKEN:
        shown = shown[: LONGEST_TOKEN - 1] + "…"
    return f'"{shown}"' if "'" in shown else f"'{shown}'"


def percent(p: float) -> str:
    if 0 < p < 0.0005:
        return "<0.1%"
    return "100%" if p >= 0.9995 else f"{100 * p:.1f}%"

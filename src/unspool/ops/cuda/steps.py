"""A step as the device reads it: one array of int32, copied over in one go.

    header | ids | positions | slots | sources | logit rows, their positions | items, three lists | tables | states |
             rows  rows        rows    rows      these where the header says

    sampling parameters

The header has 16 words for each kind of attention heads that a model has: a kind has lists of items of its own, and the
other places stand in the first 16.

States are those of recurrent layers, where a model has some: of every row the slot that its states are saved to (-1:
none) and its sequence (-1: a row that only fills up the step); of every sequence its first row, its number of rows, its
slot, and whether it begins with zeros.

The first five parts have fixed places for a given number of rows, so that kernels in a CUDA graph know them; rows past
those that a batch has are padding: their slot is -1 and nothing of theirs is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unspool.ops import ArrayBatch

HEADER = 16
# Places in the header. Of items it tells how many, where they are, and where their rows' positions are.
FEW_ITEMS, LAST_ITEMS, MANY_ITEMS, TABLES = 0, 4, 8, 12
LOGIT_ROWS, ROW_PARAMS, RESULTS, STATES = 3, 7, 11, 14  # of states where they are, and how many sequences
ITEM, SEQUENCE = 7, 4
PARAMS = 16  # words of a row's sampling parameters
KEYS, SPLIT = 64, 4  # positions of a tile of keys, tiles of a split: part of every answer's bits
# Query rows (tokens times the heads of a group) of the decode kernel's tile, and up to how many a sequence is that
# kernel's: so few are better read several times than computed among many that are not there.
DECODE_ROWS, FEW_ROWS = 16, 64
TABLE_SLACK = KEYS  # entries past the last table that a kernel may read: zeros


@dataclass(frozen=True)
class Shape:
    """What attention needs to know of a model and a device to divide the work."""

    num_heads: int
    num_kv_heads: int
    programs: int  # that the device runs at once
    capacity: int  # rows of partial results
    prompt_rows: int = 128  # query rows of the prompt kernel's tile
    has_room: bool = True  # all of these programs surely run at once

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def decode_rows(self) -> int:
        """Query rows of an item of few: a power of two with room for a token's heads."""
        return max(DECODE_ROWS, 1 << (self.group - 1).bit_length())


def places(rows: int, kinds: int = 1) -> dict[str, int]:
    """Where each part of fixed size begins: at multiples of 16 bytes, or kernels would come in two kinds."""
    names = ("ids", "positions", "slots", "sources")
    return {name: HEADER * max(kinds, 1) + index * padded(rows) for index, name in enumerate(names)}


def padded(rows: int) -> int:
    return -(-rows // 4) * 4


def size_of(batch: ArrayBatch, rows: int, logits: int, shapes: Sequence[Shape]) -> int:
    """An upper bound of what describe() writes."""
    items = 0
    for positions in (batch.positions, batch.positions[batch.logit_rows]):
        for shape in shapes:
            items += ITEM * (int((positions // (KEYS * SPLIT) + 1).sum()) + (1 + shape.group) * len(positions))
    fixed = HEADER * max(len(shapes), 1) + 4 * padded(rows) + TABLE_SLACK
    if len(batch.states):
        fixed += 2 * rows + SEQUENCE * len(batch.states)
    return fixed + 2 * logits + items + batch.tables.size + PARAMS * logits


def describe(
    out: np.ndarray,
    batch: ArrayBatch,
    rows: int,
    logits: int,
    shapes: Sequence[Shape],
    *,
    take_all: bool = False,
    sources: np.ndarray | None = None,
    params: np.ndarray | None = None,
    results: int = 0,
) -> int:
    """Write the step into `out`; its length comes back. `params` are the rows' sampling parameters, `results` says
    where theirs go."""
    live = len(batch.ids)
    at, header = places(rows, len(shapes)), HEADER * max(len(shapes), 1)
    for name, values, filler in (
        ("ids", batch.ids, 0),
        ("positions", batch.positions, 0),
        ("slots", batch.slots, -1),
        ("sources", sources, -1),
    ):
        start = at[name]
        if values is None:
            out[start : start + rows] = filler
        else:
            out[start : start + live] = values
            out[start + live : start + rows] = filler
    start = out[LOGIT_ROWS] = header + 4 * padded(rows)
    end = start + 2 * logits
    out[start:end] = 0
    out[start : start + len(batch.logit_rows)] = batch.logit_rows
    out[start + logits : start + logits + len(batch.logit_rows)] = batch.positions[batch.logit_rows]
    for kind, shape in enumerate(shapes):
        few, many = divide(batch, shape, take_all=take_all)
        last = few[:0] if take_all else divide_last(batch, shape)
        for place, items in ((FEW_ITEMS, few), (MANY_ITEMS, many), (LAST_ITEMS, last)):
            positions = start + logits if place == LAST_ITEMS else at["positions"]
            out[HEADER * kind + place : HEADER * kind + place + 3] = len(items), end, positions
            out[end : end + items.size] = items.reshape(-1)
            end += items.size
    out[TABLES], out[TABLES + 1] = end, batch.tables.shape[1]
    out[end : end + batch.tables.size] = batch.tables.reshape(-1)
    end += batch.tables.size
    out[end : end + TABLE_SLACK] = 0
    end += TABLE_SLACK
    out[STATES], out[STATES + 1] = end, len(batch.states)
    if len(batch.states):
        end += write_states(out[end:], batch, rows)
    out[ROW_PARAMS], out[RESULTS] = end, results
    if params is not None:
        end += write_params(out[end:], params, logits)
    return end


def write_states(out: np.ndarray, batch: ArrayBatch, rows: int) -> int:
    """Where states lie and go."""
    live, counts = len(batch.ids), np.diff(batch.starts)
    out[: 2 * rows] = -1
    if len(batch.saves):
        out[:live] = batch.saves
    out[rows : rows + live] = np.repeat(np.arange(len(counts)), counts)
    sequences = out[2 * rows : 2 * rows + SEQUENCE * len(counts)].reshape(-1, SEQUENCE)
    first = batch.starts[:-1]
    sequences[:, 0], sequences[:, 1], sequences[:, 2] = first, counts, batch.states
    sequences[:, 3] = batch.positions[first] == 0
    return 2 * rows + sequences.size


def write_params(out: np.ndarray, params: np.ndarray, logits: int) -> int:
    """The rows' parameters, and greedy ones for padding: their tokens go nowhere."""
    size = params.shape[1]
    out[: params.size] = params.reshape(-1)
    padding = out[params.size : logits * size].reshape(-1, size)
    padding[:] = 0
    padding[:, 12] = -1  # no counts of tokens
    return logits * size


def divide(batch: ArrayBatch, shape: Shape, *, take_all: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Attention's items: of sequences with few rows, and of those with many. No choice made here changes a bit."""
    starts = batch.starts.astype(np.int64)
    counts = np.diff(starts)
    # Such a step has no kernel for prompts: whoever wants all their logits has few of them, mostly.
    is_few = (counts * shape.group <= FEW_ROWS) | take_all
    sequence, first, tokens = _pieces(starts, counts, is_few, shape.decode_rows // shape.group)
    few = _decode_items(batch, sequence, first, tokens, batch.positions[first + tokens - 1], shape)
    sequence, first, tokens = _pieces(starts, counts, ~is_few, max(shape.prompt_rows // shape.group, 1))
    many = np.zeros((len(first), ITEM), np.int32)
    many[:, 0], many[:, 1], many[:, 2], many[:, 5] = first, tokens, sequence, -1
    many[:, 4] = batch.positions[first + tokens - 1] // KEYS + 1
    return few, _longest_first(many)


def divide_last(batch: ArrayBatch, shape: Shape) -> np.ndarray:
    """The items of the last layer, where each row whose logits are wanted, counted among those, is a piece."""
    sequence = np.searchsorted(batch.starts, batch.logit_rows, side="right") - 1
    first = np.arange(len(batch.logit_rows))
    return _decode_items(batch, sequence, first, np.ones_like(first), batch.positions[batch.logit_rows], shape)


def _pieces(
    starts: np.ndarray, counts: np.ndarray, wanted: np.ndarray, tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences cut into so many tokens each: whose, first row and number of rows of every piece."""
    sequence, place = _repeated(np.where(wanted, -(-counts // tokens), 0))
    rows = np.minimum(counts[sequence] - place * tokens, tokens)
    return sequence, starts[sequence] + place * tokens, rows


def _decode_items(
    batch: ArrayBatch, sequence: np.ndarray, first: np.ndarray, rows: np.ndarray, last: np.ndarray, shape: Shape
) -> np.ndarray:
    """Items of pieces: whose, first row, number of rows, and the last one's position."""
    tiles = last // KEYS + 1
    # Every program gets about as many tiles: a short piece is walked by one, a long one's splits are divided.
    share = -(-int(tiles.sum()) * shape.num_kv_heads // shape.programs)
    splits = -(-tiles // SPLIT)
    is_apart = (splits > 1) & (tiles > share)
    needed = np.where(is_apart, splits * rows * shape.group, 0)
    place = np.cumsum(needed) - needed
    is_apart &= place + needed <= shape.capacity
    # Four rows of up to four splits are merged in one go; more splits take longer, so each row is a program's work.
    merged = np.where(splits > 4, 1, 4)
    parts = -(-rows * shape.group // merged)
    if not shape.has_room and np.where(is_apart, splits + parts, 1).sum() * shape.num_kv_heads > shape.programs // 2:
        is_apart[:] = False  # a program's second work could wait for one that has no room: see handover.py
    whole = np.empty((len(tiles), ITEM), np.int32)
    whole[:, 0], whole[:, 1], whole[:, 2], whole[:, 3], whole[:, 4] = first, rows, sequence, 0, tiles
    whole[:, 5] = np.where(is_apart, place, -1)
    whole[:, 6] = batch.positions[batch.starts[sequence]] // KEYS
    if not is_apart.any():
        return _longest_first(whole)
    index, split = _repeated(np.where(is_apart, splits, 1))
    walks = whole[index]
    walks[:, 3] = split * SPLIT
    walks[:, 4] = np.where(is_apart[index], np.minimum((split + 1) * SPLIT, walks[:, 4]), walks[:, 4])
    # Whoever merges waits for splits, which therefore come first.
    index, part = _repeated(np.where(is_apart, parts, 0))
    merges = whole[index]
    merges[:, 3], merges[:, 4], merges[:, 6] = part * merged[index], 0, merged[index]
    return np.concatenate((_longest_first(walks), merges))


def _repeated(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every index so many times, and the how-manieth time it is."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def _longest_first(items: np.ndarray) -> np.ndarray:
    """Programs take items in turns: with the longest first, all end at about the same time."""
    return items[np.argsort(items[:, 3] - items[:, 4], kind="stable")]

"""A step as the device reads it: one array of int32, copied to the device at once.

    header | ids | positions | slots | sources | logit rows, their positions | items, three lists | tables | states |
             rows  rows        rows    rows      the header has their addresses

    sampling parameters

The header has 16 words for each kind of attention heads of a model: each kind has its own lists of items, and the
addresses of everything else are in the first 16. Four words follow for each further group of layers: where its tables
are. Its rows' slots follow the sources. A block that was released is 0 in a table: what is read of it has no weight.

States belong to recurrent layers, if a model has any. For every row: the slot that its states are saved to (-1: none)
and its sequence (-1: a padding row). For every sequence: its first row, its number of rows, its slot, and whether it
begins with zeros.

The first five parts have fixed addresses for a given number of rows, so that kernels in a CUDA graph know them. Rows
past those of the batch are padding: their slot is -1 and their results are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unspool.ops import ArrayBatch

HEADER = 16
# Places in the header. For items it has their number, their address, and the address of their rows' positions.
FEW_ITEMS, LAST_ITEMS, MANY_ITEMS, TABLES = 0, 4, 8, 12
LOGIT_ROWS, ROW_PARAMS, RESULTS, STATES = 3, 7, 11, 14  # for states: their address, and the number of sequences
ITEM, SEQUENCE = 7, 4
GROUP = 4  # words of the header for each group of layers after the first
PARAMS = 16  # words of a row's sampling parameters
KEYS, SPLIT = 64, 4  # positions per tile of keys, tiles per split; both affect the bits of every result
# Query rows (tokens times the heads of a group) of the decode kernel's tile, and the most query rows of a sequence that
# this kernel computes: reading keys several times is better than a large tile that is mostly padding.
DECODE_ROWS, FEW_ROWS = 16, 64
TABLE_SLACK = KEYS  # entries after the last table that a kernel may read: zeros


@dataclass(frozen=True)
class Shape:
    """The properties of a model and a device by which attention's work is divided."""

    num_heads: int
    num_kv_heads: int
    programs: int  # programs that the device runs at once
    capacity: int  # rows of partial results
    prompt_rows: int = 128  # query rows of the prompt kernel's tile
    has_room: bool = True  # all of these programs are certain to be resident at once

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def decode_rows(self) -> int:
        """Query rows of an item of the decode kernel: a power of two with room for a token's heads."""
        return max(DECODE_ROWS, 1 << (self.group - 1).bit_length())


def header_of(kinds: int, groups: int = 1) -> int:
    """Words of the header."""
    return HEADER * max(kinds, 1) + GROUP * (groups - 1)


def tables_of(kinds: int, group: int) -> int:
    """The place in the header of the address and the width of a group's tables."""
    return TABLES if group == 0 else header_of(kinds, group)


def slots_of(group: int) -> str:
    """The name of the part that has the slots of a group."""
    return f"slots{group}" if group else "slots"


def places(rows: int, kinds: int = 1, groups: int = 1) -> dict[str, int]:
    """Where each part of fixed size begins: at multiples of 16 bytes, so that kernels are compiled for one alignment
    only."""
    names = ("ids", "positions", "slots", "sources", *(slots_of(group) for group in range(1, groups)))
    return {name: header_of(kinds, groups) + index * padded(rows) for index, name in enumerate(names)}


def padded(rows: int) -> int:
    return -(-rows // 4) * 4


def size_of(batch: ArrayBatch, rows: int, logits: int, shapes: Sequence[Shape], groups: int = 1) -> int:
    """An upper bound for the length that describe() writes."""
    items = 0
    for positions in (batch.positions, batch.positions[batch.logit_rows]):
        for shape in shapes:
            items += ITEM * (int((positions // (KEYS * SPLIT) + 1).sum()) + (1 + shape.group) * len(positions))
    fixed = header_of(len(shapes), groups) + (3 + groups) * padded(rows) + TABLE_SLACK
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
    groups: int = 1,
    releases: bool = False,
) -> int:
    """Write the step into `out` and return its length. `params` are the rows' sampling parameters, `results` is the
    address for their results. With `releases`, tables may have released blocks."""
    live = len(batch.ids)
    at, header = places(rows, len(shapes), groups), header_of(len(shapes), groups)
    parts = [("ids", batch.ids, 0), ("positions", batch.positions, 0), ("sources", sources, -1)]
    parts += [(slots_of(group), batch.slots[group * live : (group + 1) * live], -1) for group in range(groups)]
    for name, values, filler in parts:
        start = at[name]
        if values is None:
            out[start : start + rows] = filler
        else:
            out[start : start + live] = values
            out[start + live : start + rows] = filler
    start = out[LOGIT_ROWS] = header + (3 + groups) * padded(rows)
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
    size = batch.tables.size // groups
    for group in range(groups):
        place = tables_of(len(shapes), group)
        out[place], out[place + 1] = end + group * size, batch.tables.shape[1]
    tables = np.maximum(batch.tables, 0) if releases else batch.tables
    out[end : end + batch.tables.size] = tables.reshape(-1)
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
    """Write the slots and sequences of states."""
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
    """Write the rows' parameters, and greedy ones for padding rows, whose tokens are not used."""
    size = params.shape[1]
    out[: params.size] = params.reshape(-1)
    padding = out[params.size : logits * size].reshape(-1, size)
    padding[:] = 0
    padding[:, 12] = -1  # no counts of tokens
    return logits * size


def divide(batch: ArrayBatch, shape: Shape, *, take_all: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Attention's items: those of sequences with few rows, and those of sequences with many. No choice here affects a
    bit."""
    starts = batch.starts.astype(np.int64)
    counts = np.diff(starts)
    # Such a step has no prompt kernel: requests that need logits for all rows usually have few rows.
    is_few = (counts * shape.group <= FEW_ROWS) | take_all
    sequence, first, tokens = _pieces(starts, counts, is_few, shape.decode_rows // shape.group)
    few = _decode_items(batch, sequence, first, tokens, batch.positions[first + tokens - 1], shape)
    sequence, first, tokens = _pieces(starts, counts, ~is_few, max(shape.prompt_rows // shape.group, 1))
    many = np.zeros((len(first), ITEM), np.int32)
    many[:, 0], many[:, 1], many[:, 2], many[:, 5] = first, tokens, sequence, -1
    many[:, 4] = batch.positions[first + tokens - 1] // KEYS + 1
    return few, _longest_first(many)


def divide_last(batch: ArrayBatch, shape: Shape) -> np.ndarray:
    """The items of the last layer: each logit row is a piece, and is numbered among the logit rows."""
    sequence = np.searchsorted(batch.starts, batch.logit_rows, side="right") - 1
    first = np.arange(len(batch.logit_rows))
    return _decode_items(batch, sequence, first, np.ones_like(first), batch.positions[batch.logit_rows], shape)


def _pieces(
    starts: np.ndarray, counts: np.ndarray, wanted: np.ndarray, tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divide sequences into pieces of at most `tokens` tokens: each piece's sequence, first row and number of rows."""
    sequence, place = _repeated(np.where(wanted, -(-counts // tokens), 0))
    rows = np.minimum(counts[sequence] - place * tokens, tokens)
    return sequence, starts[sequence] + place * tokens, rows


def _decode_items(
    batch: ArrayBatch, sequence: np.ndarray, first: np.ndarray, rows: np.ndarray, last: np.ndarray, shape: Shape
) -> np.ndarray:
    """The items of pieces, given each piece's sequence, first row, number of rows, and last row's position."""
    tiles = last // KEYS + 1
    # Every program gets about as many tiles: one program processes a short piece, several the splits of a long one.
    share = -(-int(tiles.sum()) * shape.num_kv_heads // shape.programs)
    splits = -(-tiles // SPLIT)
    is_apart = (splits > 1) & (tiles > share)
    needed = np.where(is_apart, splits * rows * shape.group, 0)
    place = np.cumsum(needed) - needed
    is_apart &= place + needed <= shape.capacity
    # Four rows of up to four splits are merged by one program; more splits take longer, so each row gets a program.
    merged = np.where(splits > 4, 1, 4)
    parts = -(-rows * shape.group // merged)
    if not shape.has_room and np.where(is_apart, splits + parts, 1).sum() * shape.num_kv_heads > shape.programs // 2:
        is_apart[:] = False  # a program's second item could wait for a program that is not resident, see handover.py
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
    # Programs that merge wait for splits, so the splits come first.
    index, part = _repeated(np.where(is_apart, parts, 0))
    merges = whole[index]
    merges[:, 3], merges[:, 4], merges[:, 6] = part * merged[index], 0, merged[index]
    return np.concatenate((_longest_first(walks), merges))


def _repeated(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Repeat every index by its count; returns the indices, and the number of each repetition from 0 on."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def _longest_first(items: np.ndarray) -> np.ndarray:
    """Sort items by length, the longest first, so that all programs end at about the same time."""
    return items[np.argsort(items[:, 3] - items[:, 4], kind="stable")]

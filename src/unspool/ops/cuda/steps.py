"""A step as the device reads it: one array of int32, copied over in one go.

    header | ids | positions | slots | sources | logit rows | items, three lists | tables | sampling parameters
    16       rows  rows        rows    rows      these lists where the header says

The first five parts have fixed places for a given number of rows, so that kernels in a CUDA graph know them; rows past
those that a batch has are padding: their slot is -1 and nothing of theirs is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unspool.ops import Batch

HEADER = 16
# Places in the header.
FEW_ITEMS, MANY_ITEMS, TABLES, LOGIT_ROWS, ROW_PARAMS, RESULTS, WALKED_ITEMS = 0, 2, 4, 6, 7, 8, 9
ITEM = 7
PARAMS = 16  # words of a row's sampling parameters
KEYS = 128  # positions of a tile of keys: part of every answer's bits
FEW_ROWS, MANY_ROWS = 64, 128  # query rows (tokens times heads of a group) of the attention kernels' tiles
# From so many rows on, sequences that one program can walk get a kernel whose pipeline is made for that.
WALK_FROM = 8
WALK_TILES, WALK_PROGRAMS = 8, 32  # walked rather than divided: so short, among so many
TABLE_SLACK = KEYS  # entries past the last table that a kernel may read: zeros


@dataclass(frozen=True)
class Shape:
    """What attention needs to know of a model and a device to divide the work."""

    num_heads: int
    num_kv_heads: int
    programs: int  # that the device runs at once
    capacity: int  # rows of partial results
    has_walk: bool = True  # a kernel for sequences that one program walks; it pays where the copy engine can feed it


def places(rows: int) -> dict[str, int]:
    """Where each part of fixed size begins: at multiples of 16 bytes, or kernels would come in two kinds."""
    names = ("ids", "positions", "slots", "sources")
    return {name: HEADER + index * padded(rows) for index, name in enumerate(names)}


def padded(rows: int) -> int:
    return -(-rows // 4) * 4


def size_of(batch: Batch, rows: int, logits: int) -> int:
    """An upper bound of what describe() writes."""
    tiles = int((batch.positions[batch.starts[1:] - 1] // KEYS + 1).sum()) if len(batch.ids) else 0
    items = ITEM * (tiles + 2 * len(batch.ids))
    return HEADER + 4 * padded(rows) + logits + items + batch.tables.size + TABLE_SLACK + PARAMS * logits


def describe(
    out: np.ndarray,
    batch: Batch,
    rows: int,
    logits: int,
    shape: Shape,
    *,
    take_all: bool = False,
    sources: np.ndarray | None = None,
    params: np.ndarray | None = None,
    results: int = 0,
) -> int:
    """Write the step into `out`; its length comes back. `params` are the rows' sampling parameters, `results` says
    where theirs go."""
    live = len(batch.ids)
    at = places(rows)
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
    start = out[LOGIT_ROWS] = HEADER + 4 * padded(rows)
    out[start : start + len(batch.logit_rows)] = batch.logit_rows
    out[start + len(batch.logit_rows) : start + logits] = 0
    end = start + logits
    few, many = divide(batch, shape, FEW_ROWS if take_all else MANY_ROWS)
    if take_all:  # such a step has no kernel for prompts: whoever wants all their logits has few of them, mostly
        few, many = np.concatenate([few, many]), many[:0]
    walked = few[:0]
    if shape.has_walk and rows >= WALK_FROM:
        is_walked = few[:, 5] < 0
        few, walked = few[~is_walked], few[is_walked]
    for place, items in ((FEW_ITEMS, few), (MANY_ITEMS, many), (WALKED_ITEMS, walked)):
        out[place], out[place + 1] = len(items), end
        out[end : end + items.size] = items.reshape(-1)
        end += items.size
    out[TABLES], out[TABLES + 1] = end, batch.tables.shape[1]
    out[end : end + batch.tables.size] = batch.tables.reshape(-1)
    end += batch.tables.size
    out[end : end + TABLE_SLACK] = 0
    end += TABLE_SLACK
    out[ROW_PARAMS], out[RESULTS] = end, results
    if params is not None:
        end += write_params(out[end:], params, logits)
    return end


def write_params(out: np.ndarray, params: np.ndarray, logits: int) -> int:
    """The rows' parameters, and greedy ones for padding: their tokens go nowhere."""
    size = params.shape[1]
    out[: params.size] = params.reshape(-1)
    padding = out[params.size : logits * size].reshape(-1, size)
    padding[:] = 0
    padding[:, 12] = -1  # no counts of tokens
    return logits * size


def divide(batch: Batch, shape: Shape, many_rows: int = MANY_ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Attention's items: of sequences with few rows, and of those with many. No choice made here changes a bit."""
    group = shape.num_heads // shape.num_kv_heads
    starts = batch.starts.astype(np.int64)
    counts = np.diff(starts)
    sequences = np.flatnonzero(counts > 0)
    is_few = counts[sequences] <= FEW_ROWS // group
    few = _few_items(batch, sequences[is_few], starts, counts, group, shape)
    many = [_prompt_items(batch, s, int(starts[s]), int(counts[s]), many_rows // group) for s in sequences[~is_few]]
    if not many:
        return few, np.zeros((0, ITEM), np.int32)
    # The longest first: programs take items as they come free.
    joined = np.concatenate(many)
    return few, joined[np.argsort(joined[:, 3] - joined[:, 4], kind="stable")]


def _few_items(
    batch: Batch, sequences: np.ndarray, starts: np.ndarray, counts: np.ndarray, group: int, shape: Shape
) -> np.ndarray:
    rows = counts[sequences]
    tiles = batch.positions[starts[sequences] + rows - 1] // KEYS + 1
    # Every program gets about as many tiles: a short sequence is walked by one, a long one divided among several.
    total = int(tiles.sum()) * shape.num_kv_heads
    share = max(1, -(-total // shape.programs))
    if shape.has_walk and len(sequences) * shape.num_kv_heads >= WALK_PROGRAMS:
        share = max(share, WALK_TILES)
    apart = tiles > share
    needed = np.where(apart, tiles * rows * group, 0)
    place = np.cumsum(needed) - needed
    apart &= place + needed <= shape.capacity
    pieces = np.where(apart, -(-tiles // share), 1)
    index = np.repeat(np.arange(len(sequences)), pieces)
    piece = np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = np.where(apart[index], piece * share, 0)
    items = np.empty((len(index), ITEM), np.int32)
    items[:, 0] = starts[sequences][index]
    items[:, 1] = rows[index]
    items[:, 2] = sequences[index]
    items[:, 3] = first
    items[:, 4] = np.where(apart[index], np.minimum(first + share, tiles[index]), tiles[index])
    items[:, 5] = np.where(apart[index], place[index], -1)
    items[:, 6] = index
    return items


def _prompt_items(batch: Batch, sequence: int, start: int, count: int, tokens: int) -> np.ndarray:
    first = np.arange(start, start + count, tokens)
    end = np.minimum(first + tokens, start + count)
    items = np.zeros((len(first), ITEM), np.int32)
    items[:, 0] = first
    items[:, 1] = end - first
    items[:, 2] = sequence
    items[:, 4] = batch.positions[end - 1] // KEYS + 1
    items[:, 5] = -1
    return items

"""The tile of a linear layer: a table by shape and number of tokens, tuned on an H200.

Only `splits` affects the bits, so it depends on the weight's shape alone. Everything else may differ between numbers of
tokens: the width of a tile in tokens, features per program, warps, pipeline stages.
"""

from __future__ import annotations

from dataclasses import dataclass

PROGRAMS = 132  # multiprocessors of the card that the table was tuned on


@dataclass(frozen=True)
class Tile:
    features: int
    tokens: int
    width: int  # columns of K per round
    warps: int
    stages: int  # pipeline depth: rounds whose weights are loaded or in flight
    parallel: bool  # one program per split; else one program processes all splits
    near: int = 0  # rounds that the threads themselves prefetch tokens ahead; 0: TMA loads tokens like weights


def splits_of(features: int, width: int, *, is_decoded: bool = False) -> int:
    """The number of splits of K. Half of the multiprocessors can saturate the memory, so most layers need only one
    split, and a long prompt's tiles have registers for only one. Weights that must be decoded need every
    multiprocessor."""
    programs, most, least = -(-features // 64), 256 if is_decoded else 64, 512 if is_decoded else 2048
    splits = 1
    while programs * splits < most and width // (splits * 2) >= least:
        if split_width(width, splits * 2) * (splits * 2 - 1) >= width:
            break  # the last split would be empty
        splits *= 2
    return splits


def split_width(width: int, splits: int) -> int:
    """Columns of a split: a multiple of every tile's width."""
    steps = -(-width // 256)
    return -(-steps // splits) * 256


def tile_of(features: int, width: int, tokens: int) -> Tile:
    splits = splits_of(features, width)
    many = features >= 8192  # more tiles than multiprocessors
    if tokens <= 8:  # weights are prefetched before the previous kernel has ended, tokens after it
        if many:  # two programs per multiprocessor: all at once, or one after the other
            at_once = -(-features // 64) <= 2 * PROGRAMS
            return Tile(64, 16, 128, 4, 6, True, near=2) if at_once else Tile(64, 16, 256, 4, 3, True, near=1)
        if width >= 8192:
            return Tile(64, 16, 256, 4, 5, True, near=3)
        is_short = features <= 4096 <= width  # so few programs that a round takes less time than loading tokens
        return Tile(64, 16, 256, 4, 6, True, near=3 if is_short else 2)
    if tokens <= 16:
        return Tile(64, 16, 128, 4, 5, True) if many else Tile(64, 16, 256, 4, 5, True)
    if tokens <= 32:
        return Tile(64, 32, 128, 4, 4, True) if many else Tile(64, 32, 256, 4, 4, True)
    if tokens <= 64:
        return Tile(128, 64, 128, 8, 4, True) if many else Tile(64, 64, 128, 4, 6, True)
    if tokens <= 128:
        if many:  # two programs per multiprocessor, or one with a deeper pipeline if there is only one
            return Tile(128, 128, 64, 8, 3 if -(-features // 128) > PROGRAMS else 6, True)
        return Tile(64, 128, 128, 4, 4, True) if splits > 1 or features >= 6144 else Tile(64, 64, 128, 4, 6, True)
    if tokens <= 256:
        if many:
            return Tile(128, 256, 64, 8, 4, True)
        return Tile(128, 128, 64, 8, 6, True) if features >= 6144 else Tile(64, 128, 128, 4, 4, True)
    wide = -(-features // 128) * -(-tokens // 256) >= PROGRAMS
    if splits == 1 and wide:
        return Tile(128, 256, 64, 8, 4, False)
    return Tile(128, 128, 64, 8, 4, False)

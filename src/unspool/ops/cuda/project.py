"""A linear layer for so many rows: which kernel, which tile, and what that is called with besides what comes after the
sum (see finish.py), which is the same for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from unspool.errors import BackendError
from unspool.ops.cuda.launch import Launch, descriptor, multiprocessors
from unspool.ops.cuda.linear import linear_kernel, linear_many_kernel
from unspool.ops.cuda.matrix import DeviceMatrix
from unspool.ops.cuda.plane_layout import tile_columns
from unspool.ops.cuda.quantized import quantized_kernel
from unspool.ops.cuda.tiles import Tile, split_width, splits_of, tile_of

SHARED = 200_000  # bytes that a program's rounds may take: what a multiprocessor has, less some for the end

FEW, SOME = 8, 32  # rows: up to the first what lies between kernels counts
# Columns that a linear layer, of few rows, of some or of more, has yet to come when it lets the next kernel in. Later,
# and that one's first weights come late; earlier, and its programs take the free multiprocessors two to a pair, which
# shares its way to memory.
LEFT = {"heads": 2560, "output": 1536, "gated": 256, "down": 1536}
LEFT_OF_SOME = {"heads": 1536, "output": 768, "gated": 0, "down": 768}
LEFT_OF_MORE = {"heads": 1024, "output": 1536, "gated": 0, "down": 0}


def columns_left(kind: str, rows: int) -> int:
    """For `left` of Projection.launch."""
    return (LEFT if rows <= FEW else LEFT_OF_SOME if rows <= SOME else LEFT_OF_MORE)[kind]


class Projection:
    def __init__(self, matrix: DeviceMatrix, rows: int) -> None:
        self.matrix, self.rows = matrix, rows
        self.features, self.width = matrix.out_features, matrix.planes.width
        self.is_plain = matrix.format == "bf16"
        self.tile = tile_of(self.features, self.width, rows) if self.is_plain else self._decoding_tile()
        self.splits = splits_of(self.features, self.width, is_decoded=not self.is_plain)
        self.tiles = -(-self.features // self.tile.features) * -(-rows // self.tile.tokens)

    @property
    def is_many(self) -> bool:
        """Every tile of such a layer would add a row's groups of squares again: it wants their sum."""
        return not self.tile.parallel

    def launch(
        self, x: Tensor, parts: int, partial: Tensor, arrivals: Tensor, after: dict[str, Any], left: int, label: str
    ) -> Launch:
        """`parts`: groups' sums of squares that each row comes with. `left`: columns that are yet to come when the next
        kernel is let in, of weights that need no decoding. `partial` and `arrivals`: room for splits' sums."""
        tile, rows = self.tile, x[: max(self.rows, 16)]
        args = after | {"num_tokens": self.rows, "features": self.features, "width": self.width}
        args |= {"F": tile.features, "T": tile.tokens}
        if self.is_plain and self.is_many and self.splits == 1 and args["EPILOGUE"] != "heads":
            args |= {"w": descriptor(self.matrix.planes.codes, tile.features, tile.width), "K": tile.width}
            args |= {"x": descriptor(rows, tile.tokens, tile.width), "squares": args.pop("parts")}
            return self._made(linear_many_kernel, min(self.tiles, multiprocessors()), args, label)
        self._check_room(partial, arrivals)
        columns = split_width(self.width, self.splits)
        args |= {"PARTS": parts, "split_width": columns, "SPLITS": self.splits, "PARALLEL": tile.parallel}
        args["ALL"] = self.rows <= tile.tokens
        args |= {"partial": partial, "arrivals": arrivals}
        programs = self.tiles * (self.splits if tile.parallel else 1)
        if self.is_plain:
            return self._made(linear_kernel, programs, args | self._plain(rows, parts, columns, left), label)
        return self._made(quantized_kernel, programs, args | self._planes(rows, parts, columns), label)

    def _decoding_tile(self) -> Tile:
        """For weights that become bf16 on the way: its width are the columns that a round decodes."""
        tile = tile_of(self.features, self.width, max(self.rows, 16))
        tokens = min(tile.tokens, 128)  # decoding takes the registers
        is_half = self.matrix.planes.format.startswith("u4")  # two codes a byte, and two products a round
        is_wide = is_half or self.matrix.planes.format == "f8g128"  # which has one scale for 128 columns
        columns = 128 if is_wide or (tokens <= 32 and self.width % 128 == 0) else 64
        of_tokens, of_codes = 2 * tokens * columns, tile.features * columns // (2 if is_half else 1)
        most = 1 + (SHARED - of_tokens) // (of_tokens + of_codes)
        stages, near = (4, 2) if tokens <= 16 else (min(tile.stages, most), 0)
        return replace(tile, tokens=tokens, width=columns, stages=stages, near=near)

    def _plain(self, rows: Tensor, parts: int, columns: int, left: int) -> dict[str, Any]:
        tile = self.tile
        rounds = -(-(self.width - (self.splits - 1) * columns) // tile.width)  # of the shortest split
        ahead = tile.parallel and parts <= tile.width // 32 * rounds
        near = tile.near if ahead else 0
        return {
            "w": descriptor(self.matrix.planes.codes, tile.features, tile.width),
            "x": rows if near else descriptor(rows, tile.tokens, tile.width),
            "K": tile.width,
            "AHEAD": ahead,
            "EARLY": ahead and left > 0,
            "let_after": max(columns - left, 0) // tile.width * tile.width,
            "FAR": tile.stages - 1,
            "NEAR": near,
        }

    def _planes(self, rows: Tensor, parts: int, columns: int) -> dict[str, Any]:
        planes, tile = self.matrix.planes, self.tile
        rounds = -(-(self.width - (self.splits - 1) * columns) // tile.width)  # of the shortest split
        at_once = tile.width // 2 if planes.format.startswith("u4") else tile.width  # columns of a product, and bytes
        args = {"codes": descriptor(planes.codes, tile.features, at_once), "FORMAT": planes.format}
        args |= {"scales": planes.scales, "offsets": planes.offsets, "TILE": tile_columns(planes.width)}
        each = -(-parts // rounds)  # sums of squares that a round has to add
        near = tile.near if each <= 16 else 0
        args |= {"x": rows if near else descriptor(rows, tile.tokens, at_once), "K": tile.width}
        args |= {"EACH": each, "FAR": tile.stages - 1, "NEAR": near}
        return args | {"size": rows.shape[1]}

    def _made(self, kernel: Any, programs: int, args: dict[str, Any], label: str) -> Launch:
        size, operations = self.rows * (self.width + self.features), self.rows * self.features * self.width
        cost = {"bytes": self.matrix.nbytes + 2 * size, "flops": 2 * operations}
        return Launch(kernel, (programs,), args, warps=self.tile.warps, stages=self.tile.stages, label=label, **cost)

    def _check_room(self, partial: Tensor, arrivals: Tensor) -> None:
        size = self.tiles * self.splits * self.tile.features * self.tile.tokens
        is_used = self.tile.parallel and self.splits > 1
        if is_used and (size > partial.numel() or self.tiles > arrivals.numel()):
            raise BackendError(f"a linear layer needs room for {size:,} partial sums; {partial.numel():,} are there")

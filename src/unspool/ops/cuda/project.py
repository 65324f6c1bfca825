"""A linear layer for a given number of rows: its kernel, its tile, and the arguments that do not belong to the epilogue
(see finish.py)."""

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

SHARED = 200_000  # bytes of shared memory for a program's rounds: a multiprocessor's, less some for the epilogue

FEW, SOME = 8, 32  # numbers of rows: up to FEW, the time between kernels matters
# Columns that a linear layer has yet to process when it lets the next kernel start: for few rows, some, or more. If it
# does so later, the next kernel's first weights arrive late; if earlier, that kernel's programs occupy the free
# multiprocessors in pairs, and share their memory bandwidth.
LEFT = {"heads": 2560, "output": 1536, "gated": 256, "down": 1536}
LEFT_OF_SOME = {"heads": 1536, "output": 768, "gated": 0, "down": 768}
LEFT_OF_MORE = {"heads": 1024, "output": 1536, "gated": 0, "down": 0}


def columns_left(kind: str, rows: int) -> int:
    """The value for `left` of Projection.launch."""
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
        """Whether the layer needs each row's total sum of squares, because each of its tiles would add the groups' sums
        again."""
        return not self.tile.parallel

    def launch(
        self, x: Tensor, parts: int, partial: Tensor, arrivals: Tensor, after: dict[str, Any], left: int, label: str
    ) -> Launch:
        """`parts`: the number of groups' sums of squares per row. `left`: columns yet to be processed when the next
        kernel may start, for weights that need no decoding. `partial` and `arrivals`: buffers for the sums of
        splits."""
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
        """The tile for weights that are decoded to bf16; its width is the number of columns that a round decodes."""
        tile = tile_of(self.features, self.width, max(self.rows, 16))
        tokens = min(tile.tokens, 128)  # decoding needs the registers
        is_half = self.matrix.planes.format.startswith("u4")  # two codes a byte, and two products a round
        is_wide = is_half or self.matrix.planes.format == "f8g128"  # one scale for 128 columns
        columns = 128 if is_wide or (tokens <= 32 and self.width % 128 == 0) else 64
        of_tokens, of_codes = 2 * tokens * columns, tile.features * columns // (2 if is_half else 1)
        most = 1 + (SHARED - of_tokens) // (of_tokens + of_codes)
        stages, near = (4, 2) if tokens <= 16 else (min(tile.stages, most), 0)
        return replace(tile, tokens=tokens, width=columns, stages=stages, near=near)

    def _plain(self, rows: Tensor, parts: int, columns: int, left: int) -> dict[str, Any]:
        tile = self.tile
        rounds = -(-(self.width - (self.splits - 1) * columns) // tile.width)  # rounds of the shortest split
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
        rounds = -(-(self.width - (self.splits - 1) * columns) // tile.width)  # rounds of the shortest split
        at_once = tile.width // 2 if planes.format.startswith("u4") else tile.width  # columns per product, and bytes
        args = {"codes": descriptor(planes.codes, tile.features, at_once), "FORMAT": planes.format}
        args |= {"scales": planes.scales, "offsets": planes.offsets, "TILE": tile_columns(planes.width)}
        each = -(-parts // rounds)  # sums of squares that a round adds
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

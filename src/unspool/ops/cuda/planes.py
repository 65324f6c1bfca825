"""Splits a file's quantized blocks into planes (see plane_layout.py), on the device, with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unspool.ops.cuda.memory import ROWS
from unspool.ops.cuda.plane_layout import tile_columns
from unspool.weights.formats import FORMATS

NIBBLE_COLUMNS = 128  # a byte holds columns k and k + 64 of these
BYTE_COLUMNS = 64  # columns that a kernel reads at a time, at least
FLOAT_COLUMNS = 128  # columns of 8-bit floats that share a scale


@dataclass(frozen=True)
class Planes:
    """value = scale · code + offset. `width` includes padding columns, whose scale and offset are 0. All formats but
    bf16 are in tiles, see plane_layout.py."""

    format: str
    features: int
    width: int
    codes: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None

    @staticmethod
    def of_bf16(values: Tensor) -> Planes:
        features, width = values.shape
        return Planes("bf16", features, width, values.contiguous())

    @staticmethod
    def of_rows(format: str, width: int, codes: Tensor, scales: Tensor, offsets: Tensor | None = None) -> Planes:
        """Build planes from tensors that have a row for each feature."""
        tiles = width // tile_columns(width)
        return Planes(
            format=format,
            features=len(codes),
            width=width,
            codes=_codes_in_tiles(codes, tiles),
            scales=_in_tiles(scales, tiles),
            offsets=None if offsets is None else _in_tiles(offsets, tiles),
        )

    @staticmethod
    def stack(planes: Sequence[Planes]) -> Planes:
        def joined(parts: Sequence[Tensor | None]) -> Any:
            return None if parts[0] is None else torch.cat([part for part in parts if part is not None])

        first, rows = planes[0], [plane.rows() for plane in planes]
        if first.format == "bf16":
            return Planes.of_bf16(joined([codes for codes, *_ in rows]))
        return Planes.of_rows(first.format, first.width, *(joined(parts) for parts in zip(*rows, strict=True)))

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.offsets) if t is not None)

    def rows(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Codes, scales and offsets with a row for each feature."""
        if self.format == "bf16":
            return self.codes, None, None
        tiles = self.width // tile_columns(self.width)
        scales, offsets = (
            None if plane is None else _in_rows(plane, tiles, self.features) for plane in (self.scales, self.offsets)
        )
        return _codes_in_rows(self.codes, tiles, self.features), scales, offsets

    def select(self, index: Tensor) -> Planes:
        codes, scales, offsets = self.rows()
        codes = codes.index_select(0, index)  # one tensor at a time, because little of the card's memory may be left
        if scales is None:
            return Planes.of_bf16(codes)
        offsets = None if offsets is None else offsets.index_select(0, index)
        return Planes.of_rows(self.format, self.width, codes, scales.index_select(0, index), offsets)

    def values(self) -> Tensor:
        """The float32 values, padding included, that a kernel computes from the planes before it rounds to bf16."""
        codes, scales, offsets = self.rows()
        if scales is None:
            return codes.float()
        if self.format == "f8g128":
            codes = codes.view(torch.float8_e4m3fn)
        if self.format.startswith("u4"):
            halves = codes.reshape(len(codes), -1, NIBBLE_COLUMNS // 2)
            codes = torch.cat([halves & 15, halves >> 4], 2).reshape(len(codes), -1)
        columns = self.width // scales.shape[1]
        values = codes.float() * scales.float().repeat_interleave(columns, 1)
        return values if offsets is None else values + offsets.float().repeat_interleave(columns, 1)

    def as_bf16(self, width: int) -> Planes:
        """The values as bf16, without the padding columns."""
        return Planes.of_bf16(self.values()[:, :width].to(torch.bfloat16))


def _codes_in_tiles(codes: Tensor, tiles: int) -> Tensor:
    """Rows of codes as tiles [row, byte], with the columns of every 32 in the order in which kernels read them."""
    codes = _whole(codes)
    cut = codes.reshape(len(codes) // ROWS, ROWS, tiles, -1, 2, 8, 2)
    return cut.permute(0, 2, 1, 3, 5, 4, 6).reshape(-1, codes.shape[1] // tiles).contiguous()


def _codes_in_rows(tiled: Tensor, tiles: int, features: int) -> Tensor:
    """The inverse of _codes_in_tiles."""
    cut = tiled.reshape(-(-features // ROWS), tiles, ROWS, -1, 8, 2, 2)
    return cut.permute(0, 2, 1, 3, 5, 4, 6).reshape(len(cut) * ROWS, -1)[:features]


def _in_tiles(plane: Tensor, tiles: int) -> Tensor:
    """Rows of scales or offsets as tiles [group, row]."""
    plane = _whole(plane)
    cut = plane.reshape(len(plane) // ROWS, ROWS, tiles, -1)
    return cut.permute(0, 2, 3, 1).reshape(-1, ROWS).contiguous()


def _in_rows(tiled: Tensor, tiles: int, features: int) -> Tensor:
    """The inverse of _in_tiles."""
    cut = tiled.reshape(-(-features // ROWS), tiles, -1, ROWS)
    return cut.permute(0, 3, 1, 2).reshape(len(cut) * ROWS, -1)[:features]


def _whole(rows: Tensor) -> Tensor:
    missing = -len(rows) % ROWS
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def take_apart(raw: Tensor, format: str, features: int, width: int) -> Planes:
    """The planes of a matrix stored in one of GGUF's quantized formats."""
    kind = FORMATS[format]
    if format == "fp8":
        return _float_planes(raw, features, width)
    blocks = raw.reshape(features * width // kind.block, kind.bytes_per_block)
    codes, scales, offsets = UNPACK[format](blocks)
    columns = kind.block * len(blocks) // scales.numel()
    codes, scales = codes.reshape(features, width), scales.reshape(features, -1)
    offsets = None if offsets is None else offsets.reshape(features, -1)
    if codes.dtype == torch.uint8:
        return _pack_nibbles(codes, scales, offsets, width)
    padding = -width % BYTE_COLUMNS
    name = f"i8g{columns}" + ("" if offsets is None else "o")
    return Planes.of_rows(name, width + padding, *_padded(codes, scales, offsets, width, padding))


def _float_planes(raw: Tensor, features: int, width: int) -> Planes:
    """Planes of 8-bit floats: the codes unchanged, and one float32 scale per 128 columns of a row."""
    blocks = raw.reshape(features, width // FLOAT_COLUMNS, 4 + FLOAT_COLUMNS)
    scales = blocks[:, :, :4].contiguous().view(torch.float32).reshape(features, -1)
    return Planes.of_rows("f8g128", width, blocks[:, :, 4:].reshape(features, width), scales)


def _padded(
    codes: Tensor, scales: Tensor, offsets: Tensor | None, width: int, padding: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    groups = padding * scales.shape[1] // width
    codes = torch.nn.functional.pad(codes, (0, padding))
    scales = torch.nn.functional.pad(scales.half(), (0, groups))
    if offsets is not None:
        offsets = torch.nn.functional.pad(offsets.half(), (0, groups))
    return codes, scales, offsets


def _pack_nibbles(codes: Tensor, scales: Tensor, offsets: Tensor | None, width: int) -> Planes:
    assert offsets is not None  # codes of four bits are unsigned, so each such format has an offset
    padding = -width % NIBBLE_COLUMNS
    codes, scales, offsets = _padded(codes, scales, offsets, width, padding)
    halves = codes.reshape(len(codes), -1, 2, NIBBLE_COLUMNS // 2)
    packed = (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(len(codes), -1)
    return Planes.of_rows("u4g32o", width + padding, packed, scales, offsets)


# --- each format's blocks: codes (uint8: four bits; int8: more), scales, offsets -------------------------------------


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(qs: Tensor) -> Tensor:
    return torch.cat([qs & 15, qs >> 4], 1)


def _spread(data: Tensor, group: int, bits: int) -> Tensor:
    """Unpack fields of `bits` bits: from every `group` bytes, first the lowest fields of all, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device).reshape(1, 1, -1, 1)
    fields = (data.reshape(len(data), -1, 1, group) >> shifts) & ((1 << bits) - 1)
    return fields.reshape(len(data), -1)


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], 1)
    mins = torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], 1)
    return scales.float(), mins.float()


Parts = tuple[Tensor, Tensor, Tensor | None]


def _q8_0(b: Tensor) -> Parts:
    return b[:, 2:].contiguous().view(torch.int8), _half(b, 0), None


def _q4_0(b: Tensor) -> Parts:
    scale = _half(b, 0)
    return _nibbles(b[:, 2:]), scale, -8 * scale


def _q4_1(b: Tensor) -> Parts:
    return _nibbles(b[:, 4:]), _half(b, 0), _half(b, 2)


def _fifth_bits(qh: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=qh.device)
    return ((qh[:, :, None] >> shifts) & 1).reshape(len(qh), -1)


def _q5_0(b: Tensor) -> Parts:
    codes = _nibbles(b[:, 6:]) | (_fifth_bits(b[:, 2:6]) << 4)
    return codes.to(torch.int8) - 16, _half(b, 0), None


def _q5_1(b: Tensor) -> Parts:
    codes = _nibbles(b[:, 8:]) | (_fifth_bits(b[:, 4:8]) << 4)
    return codes.to(torch.int8), _half(b, 0), _half(b, 2)


def _mxfp4(b: Tensor) -> Parts:
    twice = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8, device=b.device)
    return twice[_nibbles(b[:, 1:]).long()], torch.exp2(b[:, :1].float() - 128), None


def _q2_k(b: Tensor) -> Parts:
    scales = b[:, :16]
    scale, low = _half(b, 80) * (scales & 15).float(), _half(b, 82) * (scales >> 4).float()
    return _spread(b[:, 16:80], 32, 2).to(torch.int8), scale, -low


def _q3_k(b: Tensor) -> Parts:
    packed = b[:, 96:108]
    scales = _spread(packed[:, :8], 8, 4) | (_spread(packed[:, 8:], 4, 2) << 4)
    codes = (_spread(b[:, 32:96], 32, 2) | (_spread(b[:, :32], 32, 1) << 2)).to(torch.int8) - 4
    return codes, _half(b, 108) * (scales.float() - 32), None


def _q4_k(b: Tensor) -> Parts:
    scales, mins = _scales_and_mins(b[:, 4:16])
    return _spread(b[:, 16:], 32, 4), _half(b, 0) * scales, -_half(b, 2) * mins


def _q5_k(b: Tensor) -> Parts:
    scales, mins = _scales_and_mins(b[:, 4:16])
    codes = _spread(b[:, 48:], 32, 4) | (_spread(b[:, 16:48], 32, 1) << 4)
    return codes.to(torch.int8), _half(b, 0) * scales, -_half(b, 2) * mins


def _q6_k(b: Tensor) -> Parts:
    codes = (_spread(b[:, :128], 64, 4) | (_spread(b[:, 128:192], 32, 2) << 4)).to(torch.int8) - 32
    return codes, _half(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float(), None


UNPACK: dict[str, Callable[[Tensor], Parts]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "mxfp4": _mxfp4,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}

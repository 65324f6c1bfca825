"""A file's quantized blocks taken apart into planes (formats.py says what the planes mean), on the device, by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unspool.weights.formats import FORMATS

NIBBLE_COLUMNS = 128  # a byte holds columns k and k + 64 of these
BYTE_COLUMNS = 64  # that a kernel reads at a time
FLOAT_COLUMNS = 128  # of 8-bit floats that share a scale


@dataclass(frozen=True)
class Planes:
    """value = scale · code + offset; `width` counts padding columns, whose scale and offset are 0."""

    format: str
    width: int
    codes: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None

    @staticmethod
    def of_bf16(values: Tensor) -> Planes:
        return Planes("bf16", values.shape[1], values.contiguous())

    @staticmethod
    def stack(planes: Sequence[Planes]) -> Planes:
        def joined(name: str) -> Tensor | None:
            parts = [getattr(plane, name) for plane in planes]
            return None if parts[0] is None else torch.cat(parts)

        codes = joined("codes")
        assert codes is not None
        return Planes(planes[0].format, planes[0].width, codes, joined("scales"), joined("offsets"))

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.offsets) if t is not None)

    def select(self, rows: Tensor) -> Planes:
        def picked(plane: Tensor | None) -> Tensor | None:
            return None if plane is None else plane.index_select(0, rows)

        codes = picked(self.codes)
        assert codes is not None
        return replace(self, codes=codes, scales=picked(self.scales), offsets=picked(self.offsets))

    def values(self) -> Tensor:
        """float32, padding included; what a kernel computes from the planes, before it rounds to bf16."""
        if self.format == "bf16":
            return self.codes.float()
        assert self.scales is not None
        codes = self.codes
        if self.format == "f8g128":
            codes = codes.view(torch.float8_e4m3fn)
        if self.format.startswith("u4"):
            halves = codes.reshape(len(codes), -1, NIBBLE_COLUMNS // 2)
            codes = torch.cat([halves & 15, halves >> 4], 2).reshape(len(codes), -1)
        columns = self.width // self.scales.shape[1]
        values = codes.float() * self.scales.float().repeat_interleave(columns, 1)
        return values if self.offsets is None else values + self.offsets.float().repeat_interleave(columns, 1)

    def as_bf16(self) -> Planes:
        return Planes.of_bf16(self.values().to(torch.bfloat16))


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
    return _padded(name, codes, scales, offsets, width, padding)


def _float_planes(raw: Tensor, features: int, width: int) -> Planes:
    """8-bit floats: the codes as they are, a float32 for each 128 columns of a row."""
    blocks = raw.reshape(features, width // FLOAT_COLUMNS, 4 + FLOAT_COLUMNS)
    scales = blocks[:, :, :4].contiguous().view(torch.float32).reshape(features, -1)
    return Planes("f8g128", width, blocks[:, :, 4:].reshape(features, width).contiguous(), scales)


def _padded(name: str, codes: Tensor, scales: Tensor, offsets: Tensor | None, width: int, padding: int) -> Planes:
    groups = padding * scales.shape[1] // width
    codes = torch.nn.functional.pad(codes, (0, padding))
    scales = torch.nn.functional.pad(scales.half(), (0, groups))
    if offsets is not None:
        offsets = torch.nn.functional.pad(offsets.half(), (0, groups))
    return Planes(name, width + padding, codes.contiguous(), scales, offsets)


def _pack_nibbles(codes: Tensor, scales: Tensor, offsets: Tensor | None, width: int) -> Planes:
    assert offsets is not None  # codes of four bits count from 0, so every format has an offset
    planes = _padded("u4g32o", codes, scales, offsets, width, -width % NIBBLE_COLUMNS)
    halves = planes.codes.reshape(len(codes), -1, 2, NIBBLE_COLUMNS // 2)
    packed = (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(len(codes), -1)
    return replace(planes, codes=packed.contiguous())


# --- each format's blocks: codes (uint8: four bits; int8: more), scales, offsets -------------------------------------


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(qs: Tensor) -> Tensor:
    return torch.cat([qs & 15, qs >> 4], 1)


def _spread(data: Tensor, group: int, bits: int) -> Tensor:
    """Fields of `bits` bits: of every `group` bytes, first all lowest fields, then all next ones."""
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
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}

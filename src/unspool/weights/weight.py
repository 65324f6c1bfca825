"""A weight: a tensor in its file's storage format, and functions that decode it."""

from __future__ import annotations

import math
import sys
from array import array
from functools import cached_property

from unspool.errors import ModelError
from unspool.lazy import np
from unspool.records import record
from unspool.weights.formats import FORMATS, STORED
from unspool.weights.mapping import require_whole


@record(frozen=True, eq=False)
class Weight:
    """A named tensor in its storage format. The bytes are the file's own, memory-mapped, never copied at load.

    Names are GGUF's (`blk.0.attn_q.weight`), whatever the file; `shape` is row-major, (out_features, in_features)
    for a matrix.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    raw: memoryview  # read-only bytes; accepts any contiguous buffer

    def __post_init__(self) -> None:
        if self.format not in STORED:
            raise ModelError(f"{self.name}: unknown format {self.format!r}; known: {', '.join(FORMATS)}")
        raw = memoryview(self.raw)
        if raw.format != "B" or raw.ndim != 1 or not raw.c_contiguous:
            raise ModelError(f"{self.name}: data must be a contiguous row of bytes")
        format = STORED[self.format]
        if not self.shape or self.shape[-1] % format.block:
            raise ModelError(
                f"{self.name}: shape {self.shape} does not fit {self.format}, which has {format.block} values a block"
            )
        expected = format.nbytes(math.prod(self.shape))
        if raw.nbytes != expected:
            raise ModelError(
                f"{self.name}: {self.format} of shape {self.shape} takes {expected} bytes; {raw.nbytes} are here"
            )
        object.__setattr__(self, "raw", raw.toreadonly())

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    @cached_property
    def data(self) -> np.ndarray:
        """The bytes as an array, uint8, 1-D, read-only."""
        require_whole(self.raw)
        return np.frombuffer(self.raw, np.uint8)

    def dequantize(self) -> np.ndarray:
        """The values, float32 of `shape`: the specification of what the bytes mean."""
        return STORED[self.format].decode(self.data).reshape(self.shape)

    def dequantize_rows(self, rows: np.ndarray) -> np.ndarray:
        """The rows of a matrix that `rows` names, float32 (len(rows), in_features)."""
        num_rows = math.prod(self.shape[:-1])
        table = self.data.reshape(num_rows, -1)
        return FORMATS[self.format].decode(table[rows]).reshape(*np.shape(rows), self.shape[-1])

    def floats(self) -> array[float]:
        """A vector's float32 values. Norms are stored as float32, and then this needs no numpy."""
        if self.format != "f32" or sys.byteorder != "little":
            return array("f", self.dequantize().tobytes())
        require_whole(self.raw)
        return array("f", bytes(self.raw))


def encode_weight(name: str, values: np.ndarray, format: str = "f32") -> Weight:
    """`values` as a weight in `format`, in memory."""
    return Weight(name, format, tuple(int(n) for n in values.shape), memoryview(FORMATS[format].encode(values)))


def transposed(weight: Weight) -> Weight:
    """A matrix of floats, transposed."""
    format = FORMATS[weight.format]
    if len(weight.shape) != 2 or format.block != 1:
        raise ModelError(f"tensor {weight.name}: {weight.format} of shape {list(weight.shape)} cannot be transposed")
    rows, columns = weight.shape
    values = weight.data.reshape(rows, columns, format.bytes_per_block).transpose(1, 0, 2)
    return Weight(weight.name, weight.format, (columns, rows), np.ascontiguousarray(values).reshape(-1).data)

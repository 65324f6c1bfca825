"""Rows of float32 in ordinary memory, for code that does not need numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

from unspool.lazy import np


class FloatRows:
    """float32 [rows, width]. A row is a memoryview; a slice is again FloatRows; `np.asarray` gives an array."""

    def __init__(self, flat: memoryview[float], width: int) -> None:
        self._flat, self._width = flat, width
        self._rows = len(flat) // width

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[memoryview[float]]:
        return (self[row] for row in range(self._rows))

    @overload
    def __getitem__(self, index: int) -> memoryview[float]: ...
    @overload
    def __getitem__(self, index: slice) -> FloatRows: ...
    def __getitem__(self, index: int | slice) -> memoryview[float] | FloatRows:
        width = self._width
        if isinstance(index, slice):
            start, stop, step = index.indices(self._rows)
            if step != 1:
                raise IndexError(f"a slice of rows must have step 1, not {step}")
            return FloatRows(self._flat[start * width : max(start, stop) * width], width)
        if not -self._rows <= index < self._rows:
            raise IndexError(f"row {index} of {self._rows}")
        start = index % self._rows * width
        return self._flat[start : start + width]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The same memory as a numpy array; copied on request, or if another dtype is requested."""
        array = np.asarray(self._flat).reshape(self._rows, self._width)
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"rows of float32 cannot become {dtype} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

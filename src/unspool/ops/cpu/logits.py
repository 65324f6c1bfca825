"""A step's logits as rows of plain memory, which become an array of numpy's when anything more is asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, overload

from unspool.lazy import np


class Logits:
    """float32 [rows, width]. A row is a memoryview; a slice of rows is again this. What an array has, it has too."""

    def __init__(self, flat: memoryview, width: int) -> None:
        self._flat, self._width = flat, width
        self._rows = len(flat) // width

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[memoryview]:
        return (self[row] for row in range(self._rows))

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> Logits: ...
    def __getitem__(self, index: int | slice) -> memoryview | Logits:
        width = self._width
        if isinstance(index, slice):
            start, stop, step = index.indices(self._rows)
            if step != 1:
                raise IndexError(f"rows in steps of {step}; only neighbours make a slice")
            return Logits(self._flat[start * width : max(start, stop) * width], width)
        if not -self._rows <= index < self._rows:
            raise IndexError(f"row {index} of {self._rows}")
        start = index % self._rows * width
        return self._flat[start : start + width]

    @cached_property
    def array(self) -> np.ndarray:
        return np.frombuffer(self._flat, np.float32).reshape(self._rows, self._width)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype, copy=copy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what numpy and others look for in a stranger is not to be found by making one
            raise AttributeError(name)
        return getattr(self.array, name)

"""A checkpoint's tensors, read by name and expected shape."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unspool.errors import ModelError
from unspool.lazy import np
from unspool.ops import Experts, Matrix, Ops, Vector
from unspool.weights.weight import Weight, encode_weight


class TensorReader:
    """Prepares the tensors that a model requests. A missing tensor, or one that the model did not request, is an
    error."""

    def __init__(
        self, ops: Ops, weights: Mapping[str, Weight], progress: Callable[[float], None] | None = None
    ) -> None:
        self.ops = ops
        self._weights, self._progress = weights, progress
        self._read: set[str] = set()
        self._num_read, self._num_bytes = 0, sum(weight.nbytes for weight in weights.values()) if progress else 0

    def matrix(self, *parts: tuple[str, int, int]) -> Matrix:
        """One prepared matrix from (name, out_features, in_features) parts that share their input."""
        return self.ops.matrix(self._take([(name, (rows, columns)) for name, rows, columns in parts]))

    def vector(self, *parts: tuple[str | None, int]) -> Vector:
        """One prepared vector from (name, size) parts, concatenated. A part without a name is ones."""
        return self.ops.vector(
            [_ones(size) if name is None else self._take([(name, (size,))])[0] for name, size in parts]
        )

    def table(self, name: str, rows: int, columns: int) -> Vector:
        """A vector that files store as a matrix, row after row."""
        return self.ops.vector(self._take([(name, (rows, columns))]))

    def row(self, name: str, width: int) -> Matrix:
        """A matrix of one row, which most files store as a vector."""
        stored = self._weights.get(name)
        shape = (1, width) if stored is not None and len(stored.shape) == 2 else (width,)
        (row,) = self._take([(name, shape)])
        return self.ops.matrix([Weight(name, row.format, (1, width), row.raw)])

    def stacked(self, name: str, count: int, rows: int, columns: int) -> Matrix:
        """One prepared matrix from `count` matrices that share their input, stored as `experts` describes."""
        return self.ops.matrix(self._stack(name, count, (rows, columns)))

    def matrices(self, name: str, count: int, rows: int, columns: int) -> list[Matrix]:
        """`count` prepared matrices, stored as `experts` describes."""
        return [self.ops.matrix([each]) for each in self._stack(name, count, (rows, columns))]

    def experts(self, count: int, *parts: tuple[str, int, int]) -> Experts:
        """One prepared matrix for each of `count` experts, from tensors [expert, out_features, in_features].

        Files with separate experts have the expert's number in the name: NAME.3.weight.
        """
        stacks = [self._stack(name, count, (rows, columns)) for name, rows, columns in parts]
        return self.ops.experts(list(zip(*stacks, strict=True)))

    def expert_vectors(self, count: int, *parts: tuple[str, int]) -> Vector:
        """The parts' vectors [expert, size] as one vector: expert by expert, each with all parts."""
        stacks = [self._stack(name, count, (size,)) for name, size in parts]
        return self.ops.vector([part for expert in zip(*stacks, strict=True) for part in expert])

    def _stack(self, name: str, count: int, shape: tuple[int, ...]) -> list[Weight]:
        stem, end = name.rsplit(".", 1)
        if name not in self._weights and f"{stem}.0.{end}" in self._weights:
            return self._take([(f"{stem}.{expert}.{end}", shape) for expert in range(count)])
        (stack,) = self._take([(name, (count, *shape))])
        size = stack.nbytes // count
        return [
            Weight(f"{stem}.{expert}.{end}", stack.format, shape, stack.raw[expert * size : (expert + 1) * size])
            for expert in range(count)
        ]

    def has(self, name: str) -> bool:
        """Whether the checkpoint has an optional tensor."""
        return name in self._weights

    def optional_floats(self, name: str, size: int) -> array[float] | None:
        """A vector's values, or None if the checkpoint does not have it."""
        return self._take([(name, (size,))])[0].floats() if name in self._weights else None

    def repeated(self, name: str, times: int) -> Vector | None:
        """One number repeated as a vector, or None if the checkpoint does not have it."""
        values = self.optional_floats(name, 1)
        return None if values is None else self.ops.vector([encode_weight(name, np.full(times, values[0], np.float32))])

    def _take(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[Weight]:
        parts = []
        for name, shape in wanted:
            if name not in self._weights:
                raise ModelError(f"tensor {name} is missing")
            part = self._weights[name]
            if part.shape != shape:
                raise ModelError(f"tensor {name} has shape {list(part.shape)}; the model needs {list(shape)}")
            self._read.add(name)
            self._num_read += part.nbytes
            parts.append(part)
        if self._progress is not None:
            self._progress(min(1.0, self._num_read / max(1, self._num_bytes)))
        return parts

    def finish(self) -> None:
        """Raise an error if tensors are left over. Call this after the model has read its tensors."""
        left = sorted(set(self._weights) - self._read)
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(f"tensor {left[0]}{more} has no place in this architecture")


def _ones(size: int) -> Weight:
    return encode_weight("ones", np.ones(size, np.float32))


class ShapeRecorder(TensorReader):
    """Prepares nothing: records the shape of every tensor that a model requests, in order."""

    def __init__(self) -> None:
        nothing: Any = None  # a model that is built only to list its tensors computes nothing
        super().__init__(nothing, {})
        self.shapes: dict[str, tuple[int, ...]] = {}

    def matrix(self, *parts: tuple[str, int, int]) -> Matrix:
        self.shapes |= {name: (rows, columns) for name, rows, columns in parts}

    def vector(self, *parts: tuple[str | None, int]) -> Vector:
        self.shapes |= {name: (size,) for name, size in parts if name is not None}

    def repeated(self, name: str, times: int) -> Vector | None:
        self.shapes[name] = (1,)
        return None

    def table(self, name: str, rows: int, columns: int) -> Vector:
        self.shapes[name] = (rows, columns)

    def row(self, name: str, width: int) -> Matrix:
        self.shapes[name] = (width,)

    def stacked(self, name: str, count: int, rows: int, columns: int) -> Matrix:
        self.shapes[name] = (count, rows, columns)

    def matrices(self, name: str, count: int, rows: int, columns: int) -> list[Matrix]:
        self.shapes[name] = (count, rows, columns)
        return [None] * count

    def experts(self, count: int, *parts: tuple[str, int, int]) -> Experts:
        self.shapes |= {name: (count, rows, columns) for name, rows, columns in parts}

    def expert_vectors(self, count: int, *parts: tuple[str, int]) -> Vector:
        self.shapes |= {name: (count, size) for name, size in parts}

"""The building blocks of models: data that is bound to tensors and then computes rows.

`bind` reads a block's tensors and returns the function that computes the block. Tensors have GGUF's names for every
kind of file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import ClassVar, Literal, Protocol

from unspool.models.rotary import Rotary
from unspool.models.tensors import TensorReader
from unspool.ops import Batch, Experts, KVCache, Matrix, Ops, Rope, Rows, Vector
from unspool.ops.routing import Routing
from unspool.ops.storage import Storage
from unspool.records import record

# The residual stream: a block's result is added to `residual`, if one is passed.
NormFunction = Callable[[Rows, Rows | None], Rows]
MixerFunction = Callable[[Rows, Rows | None, Batch, KVCache], Rows]
FeedForwardFunction = Callable[[Rows, Rows | None], Rows]


@record(frozen=True)
class Place:
    """Where a block is bound: a layer of a model, and the tensors of that layer."""

    reader: TensorReader
    layer: int
    hidden: int  # the width of the residual stream
    residual_scale: float = 1.0  # a block's result is multiplied by this before it is added to the stream
    ropes: dict[Rotary, Rope] = field(default_factory=dict)  # equal rotations share one table in all layers

    @property
    def ops(self) -> Ops:
        return self.reader.ops

    def has(self, name: str) -> bool:
        """Whether the file has this tensor of this layer; `name` includes the suffix."""
        return self.reader.has(f"blk.{self.layer}.{name}")

    def matrix(self, *parts: tuple[str, int, int]) -> Matrix:
        """One matrix of this layer's weights: (name, out_features, in_features), as in ("ffn_up", 96, 64)."""
        prefix = f"blk.{self.layer}."
        return self.reader.matrix(*((f"{prefix}{name}.weight", rows, columns) for name, rows, columns in parts))

    def vector(self, *parts: tuple[str | None, int]) -> Vector:
        """One vector of this layer: (name with its suffix, size), such as ("attn_q.bias", 64). A part without a name is
        ones."""
        prefix = f"blk.{self.layer}."
        return self.reader.vector(*((None if name is None else prefix + name, size) for name, size in parts))

    def table(self, name: str, rows: int, columns: int) -> Vector:
        """A vector of this layer that files store as a matrix; `name` includes the suffix."""
        return self.reader.table(f"blk.{self.layer}.{name}", rows, columns)

    def experts(self, count: int, *parts: tuple[str, int, int]) -> Experts:
        """The experts of this layer: (name, out_features, in_features) of each."""
        prefix = f"blk.{self.layer}."
        return self.reader.experts(count, *((f"{prefix}{name}.weight", rows, columns) for name, rows, columns in parts))

    def expert_vectors(self, count: int, *parts: tuple[str, int]) -> Vector:
        """One vector of all experts of this layer: (name with its suffix, size), expert after expert."""
        return self.reader.expert_vectors(count, *((f"blk.{self.layer}.{name}", size) for name, size in parts))

    def rope(self, rotary: Rotary) -> Rope:
        if rotary not in self.ropes:
            name = rotary.factors
            factors = None if name is None else self.reader.optional_floats(name, rotary.dim // 2)
            self.ropes[rotary] = rotary.rope(factors)
        return self.ropes[rotary]


class Mixer(Protocol):
    """The part of a layer that reads other positions."""

    @property
    def width(self) -> int:
        """The largest number of values per row that it computes at once, for memory plans."""

    def storage(self) -> Storage:
        """What it keeps of past tokens."""

    def bind(self, place: Place) -> MixerFunction: ...


class FeedForward(Protocol):
    """The part of a layer that reads one position only."""

    @property
    def routing(self) -> Routing | None:
        """Which of its experts a row uses; None if it has no experts."""

    def row_width(self, hidden: int) -> int:
        """The largest number of values per row that it computes at once, for memory plans; a row has `hidden`
        values."""

    def bind(self, place: Place) -> FeedForwardFunction: ...


@record(frozen=True)
class RmsNorm:
    """x / rms(x) · weight; the weight is optional."""

    eps: float
    weight: bool = True
    kind: ClassVar[Literal["rms"]] = "rms"

    def tensor(self, name: str) -> str | None:
        """The weight's name, for TensorReader.vector."""
        return f"{name}.weight" if self.weight else None

    def bind(self, reader: TensorReader, name: str, width: int) -> NormFunction:
        ops, weight, eps = reader.ops, reader.vector((self.tensor(name), width)), self.eps
        return lambda x, residual: ops.norm(x, weight, eps, residual)


@record(frozen=True)
class LayerNorm:
    """(x - mean) / deviation · weight + bias; weight and bias are optional."""

    eps: float
    weight: bool = True
    bias: bool = True
    kind: ClassVar[Literal["centered"]] = "centered"

    def tensor(self, name: str) -> str | None:
        """The weight's name, for TensorReader.vector."""
        return f"{name}.weight" if self.weight else None

    def bind(self, reader: TensorReader, name: str, width: int) -> NormFunction:
        ops, weight, eps = reader.ops, reader.vector((self.tensor(name), width)), self.eps
        bias = reader.vector((f"{name}.bias", width)) if self.bias else None
        return lambda x, residual: ops.layer_norm(x, weight, bias, eps, residual)


Norm = RmsNorm | LayerNorm

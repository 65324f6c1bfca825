"""Weights in the form that the native kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import unspool._native as _native
from unspool.errors import EngineError

if TYPE_CHECKING:
    from unspool.weights.weight import Weight


class CpuMatrix:
    """Weights that share their input. They are packed into tiles when a program first multiplies by them."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        columns = {part.shape[-1] for part in parts}
        if len(columns) != 1 or any(len(part.shape) != 2 for part in parts):
            shapes = ", ".join(f"{part.name} {part.shape}" for part in parts)
            raise EngineError(f"weights that are stacked must share their input width: {shapes}")
        if any(part.format in ("fp8", "f8_e4m3") for part in parts):  # the kernels have no 8-bit floats
            from unspool.weights.fp8_scales import widened

            parts = [widened(part) for part in parts]
        self.name = parts[0].name
        self.parts = parts
        self.native = _native.Matrix([(part.format, part.raw, part.shape[0]) for part in parts], columns.pop())
        self.in_features: int = self.native.columns
        self.out_features: int = self.native.rows

    def keep_exact(self) -> None:
        """Require tiles with the exact values of the file, because rows are looked up in them or logits are computed
        from them.

        Tiles that another program has already packed stay as they are.
        """
        if not self.native.packed:
            self.native.keep_exact()

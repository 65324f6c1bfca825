"""Makes Triton's interpreter compute products as the matrix unit does, on machines without a GPU.

The interpreter keeps bf16 as bare 16-bit integers and would multiply those. It also adds products in an order that
numpy's library chooses by shape, while the matrix unit's order is the same for every shape. Products of two 16-bit
floats are exact in float64, and their sums are precise enough that rounding to float32 gives one result for every
order. Like the matrix unit, this code adds 16 products at a time to a float32 sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

STEP = 16


def _widened(operand: Any) -> np.ndarray:
    if operand.dtype.scalar == tl.bfloat16:
        return (operand.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return operand.data.astype(np.float64)


def _dot(self: Any, a: Any, b: Any, d: Any, *ignored: Any) -> Any:
    left, right, total = _widened(a), _widened(b), d.data
    with np.errstate(invalid="ignore", over="ignore"):
        for k in range(0, left.shape[1], STEP):
            total = (total + left[:, k : k + STEP] @ right[k : k + STEP]).astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


def prepare() -> None:
    interpreter.InterpreterBuilder.create_dot = _dot

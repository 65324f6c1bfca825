"""Launches kernels, on a device or under Triton's interpreter, and allocates the memory between them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@cache
def is_interpreted() -> bool:
    """Whether kernels run as Python on the CPU: TRITON_INTERPRET=1, as in the tests on machines without a GPU."""
    from triton.runtime.interpreter import InterpretedFunction

    from unspool.ops.cuda.linear import linear_kernel

    return isinstance(linear_kernel, InterpretedFunction)


@cache
def multiprocessors() -> int:
    return 2 if is_interpreted() else torch.cuda.get_device_properties(0).multi_processor_count


@cache
def has_room_for_all() -> bool:
    """Whether all programs of a launch that is sized for it are certain to be resident at once: true on the chip whose
    shared memory the sizes are computed for, unless kernels of other processes may run at the same time (NVIDIA's
    MPS)."""
    if is_interpreted():
        return True
    if torch.cuda.get_device_capability()[0] != 9:
        return False
    MPS_ENABLED, enabled = 133, ctypes.c_int(0)  # the attribute can be read from the driver API only
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuDeviceGetAttribute(ctypes.byref(enabled), MPS_ENABLED, torch.cuda.current_device())
    except (OSError, AttributeError):
        return True
    return not enabled.value


@cache
def has_dependent_launch() -> bool:
    """Whether the device has programmatic dependent launch: a kernel may start, and prefetch its weights, while the
    previous kernel still runs."""
    return not is_interpreted() and torch.cuda.get_device_capability()[0] >= 9


@dataclass(frozen=True)
class Launch:
    """One kernel with its arguments and launch options."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    warps: int = 4
    stages: int = 2
    registers: int = 255  # registers per thread, limited so that the required number of programs is resident
    label: str = ""
    bytes: int = 0  # bytes that the kernel must read and write
    flops: int = 0

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        if not is_interpreted():
            # No fused multiply-add unless a kernel requests it: which operations the compiler fuses may depend on the
            # tile.
            options |= {"enable_fp_fusion": False, "launch_pdl": has_dependent_launch()}
            options |= {"maxnreg": self.registers} if self.registers < 255 else {}
        return options

    @property
    def arguments(self) -> dict[str, Any]:
        """The kernel's arguments. Every kernel gets PDL: whether the previous kernel may still be running."""
        return self.args | {"PDL": has_dependent_launch()}


def descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A TMA descriptor for tiles of rows × columns of a matrix; elements outside the matrix read as 0."""
    return TensorDescriptor.from_tensor(tensor, [rows, columns])


@dataclass
class Arena:
    """Buffers that are taken and released while a step is laid out; equal steps get the same addresses. A buffer has
    room for a power of two of rows. So steps of all sizes, in any order, take at most twice the memory of the largest
    one."""

    device: torch.device
    _free: list[Tensor] = field(default_factory=list)
    _all: list[Tensor] = field(default_factory=list)

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        fits = [t for t in self._free if t.dtype == dtype and t.shape[1] == columns and t.shape[0] >= rows]
        if fits:
            best = min(fits, key=len)
            self._free = [t for t in self._free if t is not best]
            return best
        # At least one tile of tokens, because a descriptor's box must not be larger than its tensor.
        made = torch.zeros((max(next_power(rows), 16), columns), dtype=dtype, device=self.device)
        self._all.append(made)
        return made

    def give(self, tensor: Tensor) -> None:
        self._free.append(tensor)

    def reset(self) -> None:
        self._free = list(self._all)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._all)


def next_power(n: int) -> int:
    return int(triton.next_power_of_2(n))

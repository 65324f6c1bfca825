"""Weights on the device, prepared once: bf16, or quantized ones as planes, with rows in the kernels' order."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from unspool.errors import BackendError
from unspool.ops.cuda.planes import Planes, take_apart

if TYPE_CHECKING:
    from unspool.weights.weight import Weight

# Formats that the matrix unit reads as bf16; wider floats are rounded when they are loaded.
PLAIN = ("bf16", "f16", "f32")
LEAST_ROWS = 128  # rows that a bf16 matrix is padded to, because TMA's tile must not be larger than the tensor


@dataclass
class DeviceMatrix:
    """A matrix [out_features, in_features] on the device; `order` names the order of its rows, if they were
    rearranged."""

    name: str
    out_features: int
    in_features: int
    planes: Planes
    order: str = "plain"

    @property
    def format(self) -> str:
        return self.planes.format

    @property
    def nbytes(self) -> int:
        return self.planes.nbytes

    def arrange(self, order: str, rows: np.ndarray) -> None:
        """Put the rows into a kernel's order, once. Two kernels that need different orders cannot share a matrix."""
        if self.order == order:
            return
        if self.order != "plain":
            raise BackendError(
                f"{self.name} is used both as {self.order} and as {order}; the CUDA backend keeps one order"
            )
        index = torch.from_numpy(rows.astype(np.int64)).to(self.planes.codes.device)
        self.planes = self.planes.select(index)
        self.order = order


def make_matrix(parts: Sequence[Weight], device: torch.device) -> DeviceMatrix:
    planes = [_planes(part, device) for part in parts]
    if len({plane.format for plane in planes}) > 1:  # a file may store q, k and v in different formats
        planes = [plane.as_bf16(part.shape[1]) for plane, part in zip(planes, parts, strict=True)]
    whole = planes[0] if len(planes) == 1 else Planes.stack(planes)
    if whole.format == "bf16" and len(whole.codes) < LEAST_ROWS:  # a small matrix, such as a router's or a gate's
        missing = LEAST_ROWS - len(whole.codes)
        whole = replace(whole, codes=torch.nn.functional.pad(whole.codes, (0, 0, 0, missing)))
    return DeviceMatrix(parts[0].name, sum(part.shape[0] for part in parts), parts[0].shape[1], whole)


def make_vector(parts: Sequence[Weight], device: torch.device) -> torch.Tensor:
    values = np.concatenate([part.dequantize().reshape(-1) for part in parts])
    return torch.from_numpy(values).to(device)


def _planes(weight: Weight, device: torch.device) -> Planes:
    raw = upload(weight.data, device)
    shape = weight.shape
    if weight.format not in PLAIN:
        return take_apart(raw, weight.format, *shape)
    kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[weight.format]
    return Planes.of_bf16(raw.view(kind).reshape(shape).to(torch.bfloat16))


def upload(data: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy bytes to the device."""
    if data.flags.writeable or device.type == "cpu":
        return torch.from_numpy(np.array(data)).to(device)
    with warnings.catch_warnings():  # the mapping is read-only, and torch warns about that; nothing here writes to it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data).to(device)

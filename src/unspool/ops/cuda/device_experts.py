"""Experts' weights on the device: the matrices of all experts of a layer in one tensor, in the kernels' layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unspool.errors import BackendError
from unspool.ops.cuda.launch import descriptor
from unspool.ops.cuda.matrix import LEAST_ROWS, make_matrix
from unspool.ops.cuda.memory import ROWS
from unspool.ops.cuda.orders import gated_order
from unspool.ops.cuda.planes import Planes

if TYPE_CHECKING:
    from unspool.weights.weight import Weight


@dataclass
class DeviceExperts:
    """One matrix [out_features, in_features] for each expert. For a gate stacked on an up projection, rows j and j + 8
    of every 16 are gate and up of one feature; the rows are put in this order when the experts are first laid out."""

    name: str
    count: int
    out_features: int
    in_features: int
    planes: Planes
    is_gated: bool

    @property
    def format(self) -> str:
        return self.planes.format

    @property
    def rows_each(self) -> int:
        """Rows from the beginning of one expert to the next. Quantized experts are padded to whole tiles."""
        return self.out_features if self.format == "bf16" else -(-self.out_features // ROWS) * ROWS

    @property
    def nbytes_each(self) -> int:
        return self.planes.nbytes // self.count

    def columns_at_once(self, tokens: int, *, is_few: bool) -> tuple[int, int]:
        """The columns that one round of a product processes for this many tokens, and the columns that one copy of
        codes has."""
        is_half = self.format == "u4g32o"  # two codes a byte
        is_wide = is_half or self.format == "f8g128" or (tokens <= 32 and self.planes.width % 128 == 0)
        columns = 128 if is_wide or (self.format == "bf16" and is_few) else 64
        return columns, columns // 2 if is_half else columns

    def operands(self, features: int, columns: int) -> dict[str, Any]:
        """The kernels' arguments for the weights, in tiles of this many features and columns."""
        codes = descriptor(self.planes.codes, features, columns)
        return {"codes": codes, "scales": self.planes.scales, "offsets": self.planes.offsets}

    def join_gates(self) -> None:
        """Reorder the rows of gates and up projections that a file stores as one tensor, once."""
        if self.is_gated:
            return
        order = torch.from_numpy(gated_order(self.out_features)).to(self.planes.codes.device)
        self.planes, self.is_gated = _stacked([self._of(index).select(order) for index in range(self.count)]), True

    def _of(self, index: int) -> Planes:
        """One expert's planes: whole tiles, if the weights are in tiles."""

        def part(plane: Tensor | None) -> Any:
            if plane is None:
                return None
            size = len(plane) // self.count
            return plane[index * size : (index + 1) * size]

        whole = self.planes
        codes = whole.codes[: self.count * self.rows_each] if self.format == "bf16" else whole.codes
        return Planes(self.format, self.out_features, whole.width, part(codes), part(whole.scales), part(whole.offsets))

    def in_order(self, bias: Tensor | None) -> Tensor | None:
        """All experts' biases, in the order of the rows."""
        if bias is None or not self.is_gated:
            return bias
        index = torch.from_numpy(gated_order(self.out_features)).to(bias.device)
        return bias.reshape(self.count, -1).index_select(1, index).reshape(-1).contiguous()


def make_experts(parts: Sequence[Sequence[Weight]], device: torch.device) -> DeviceExperts:
    """Prepare experts. Two parts of an expert are its gate and its up projection."""
    first, is_gated = parts[0], len(parts[0]) == 2
    formats = {tuple(part.format for part in each) for each in parts}
    if len(formats) > 1:
        raise BackendError(f"{first[0].name}: experts of one layer are stored in different formats")
    features = sum(part.shape[0] for part in first)
    order = torch.from_numpy(gated_order(features) if is_gated else np.arange(features)).to(device)
    planes = []
    for each in parts:
        matrix = make_matrix(each, device)
        planes.append(matrix.planes.select(order))
    return DeviceExperts(first[0].name, len(parts), features, first[0].shape[1], _stacked(planes), is_gated)


def _stacked(planes: Sequence[Planes]) -> Planes:
    return Planes(
        format=planes[0].format,
        features=sum(each.features for each in planes),
        width=planes[0].width,
        codes=_at_least(torch.cat([each.codes for each in planes])),
        scales=_joined([each.scales for each in planes]),
        offsets=_joined([each.offsets for each in planes]),
    )


def _at_least(codes: Tensor) -> Tensor:
    """Pad the codes, because TMA's tile must not be larger than the tensor."""
    missing = LEAST_ROWS - len(codes)
    return torch.nn.functional.pad(codes, (0, 0, 0, missing)) if missing > 0 else codes


def _joined(planes: Sequence[Tensor | None]) -> Tensor | None:
    there = [plane for plane in planes if plane is not None]
    return torch.cat(there) if there else None

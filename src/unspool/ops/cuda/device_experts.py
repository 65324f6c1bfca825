"""Experts' weights on the device: each expert's matrix as kernels want it, all of a layer in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unspool.errors import BackendError
from unspool.ops.cuda.matrix import make_matrix
from unspool.ops.cuda.memory import ROWS
from unspool.ops.cuda.orders import gated_order
from unspool.ops.cuda.planes import Planes

if TYPE_CHECKING:
    from unspool.weights.weight import Weight


@dataclass(frozen=True)
class DeviceExperts:
    """One matrix [out_features, in_features] for each expert. Of two stacked parts, a gate and an up projection, rows
    j and j + 8 of every 16 are gate and up of one feature."""

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
        """Rows between an expert's first and the next one's: quantized ones come in whole tiles."""
        return self.out_features if self.format == "bf16" else -(-self.out_features // ROWS) * ROWS

    @property
    def nbytes_each(self) -> int:
        return self.planes.nbytes // self.count

    def in_order(self, bias: Tensor | None) -> Tensor | None:
        """All experts' biases, in the order of rows."""
        if bias is None or not self.is_gated:
            return bias
        index = torch.from_numpy(gated_order(self.out_features)).to(bias.device)
        return bias.reshape(self.count, -1).index_select(1, index).reshape(-1).contiguous()


def make_experts(parts: Sequence[Sequence[Weight]], device: torch.device) -> DeviceExperts:
    """Two parts of an expert are its gate and its up projection."""
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
    whole = Planes(
        format=planes[0].format,
        features=sum(each.features for each in planes),
        width=planes[0].width,
        codes=torch.cat([each.codes for each in planes]),
        scales=_joined([each.scales for each in planes]),
        offsets=_joined([each.offsets for each in planes]),
    )
    return DeviceExperts(first[0].name, len(parts), features, first[0].shape[1], whole, is_gated)


def _joined(planes: Sequence[Tensor | None]) -> Tensor | None:
    there = [plane for plane in planes if plane is not None]
    return torch.cat(there) if there else None

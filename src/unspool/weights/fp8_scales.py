"""Joins a checkpoint's 8-bit floats with their scales, which are separate tensors.

    W.weight  F8_E4M3 [out, in]     W.weight_scale, W.weight_scale_inv   of the tensor, of each row, of 128×128 blocks

(Both names are factors: value = code · scale.) Scales of activations and of a KV cache, which some checkpoints contain,
are not needed: activations and cache stay wider than 8 bits here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unspool.errors import ModelError
from unspool.weights.fp8 import COLUMNS, interleave, spread
from unspool.weights.weight import Weight, encode_weight

EIGHT_BIT_FLOATS = ("fp8", "f8_e4m3")  # formats
SCALES = ("_scale_inv", "_scale")  # suffixes of a weight's name
UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale")


def own_scales(tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """A directory's tensors with every 8-bit weight joined to its scales."""
    bare = [name for name, weight in tensors.items() if weight.format == "f8_e4m3"]
    if not bare:
        return dict(tensors)
    joined = {name: weight for name, weight in tensors.items() if not name.endswith(UNUSED)}
    for name in bare:
        found = [name + suffix for suffix in SCALES if name + suffix in tensors]
        if len(found) != 1:
            raise ModelError(f"tensor {name!r}: 8-bit floats need one scale beside them; there are {found or 'none'}")
        joined[name] = _with_scale(tensors[name], tensors[found[0]])
        del joined[found[0]]
    return joined


def _with_scale(weight: Weight, scale: Weight) -> Weight:
    rows, columns = weight.shape if len(weight.shape) == 2 else (0, 1)
    groups = -(-columns // COLUMNS)
    scales = spread(scale.dequantize(), rows, groups)
    if not rows or scales is None:
        raise ModelError(
            f"tensor {weight.name!r} of shape {weight.shape}: scales of shape {scale.shape} are neither the tensor's, "
            f"nor its rows', nor of {COLUMNS}×{COLUMNS} blocks"
        )
    if columns % COLUMNS == 0:
        return Weight(weight.name, "fp8", weight.shape, interleave(weight.data.reshape(rows, columns), scales).data)
    values = weight.dequantize() * np.repeat(scales, COLUMNS, axis=1)[:, :columns]
    return encode_weight(weight.name, values, "bf16")


def widened(weight: Weight) -> Weight:
    """The weight as bf16, for the CPU, which has no kernels for 8-bit floats: the product of code and scale is rounded
    to 8 bits of mantissa, and takes twice the memory."""
    return encode_weight(weight.name, weight.dequantize(), "bf16") if weight.format in EIGHT_BIT_FLOATS else weight

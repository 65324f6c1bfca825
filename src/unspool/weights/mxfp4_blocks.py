"""MXFP4 tensors of a Hugging Face directory, joined from their two parts.

    X_blocks  u8 [experts, out, in / 32, 16]    two values per byte, which are neighbours; the first is in the low half
    X_scales  u8 [experts, out, in / 32]        per 32 values: a power of two

GGUF's blocks, which all backends use, store the scale before the values, and values 16 places apart share a byte. They
are made in memory; a GGUF file would be mapped.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unspool.errors import ModelError
from unspool.weights.weight import Weight

BLOCKS, SCALES = "_blocks", "_scales"
GROUP, PACKED = 32, 16  # values per scale, and their bytes


def join_blocks(tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """A directory's tensors, in which each pair of blocks and scales is one MXFP4 weight [experts, out, in]."""
    joined = {name: weight for name, weight in tensors.items() if weight.format != "u8"}
    bytes_ = {name: weight for name, weight in tensors.items() if weight.format == "u8"}
    for name in list(bytes_):
        if name.endswith(BLOCKS):
            whole = name.removesuffix(BLOCKS)
            if whole + SCALES not in bytes_:
                raise ModelError(f"tensor {name!r}: there is no {whole + SCALES!r} beside it")
            joined[whole] = _joined(whole, bytes_.pop(name), bytes_.pop(whole + SCALES))
    for name in bytes_:
        raise ModelError(f"tensor {name!r}: bytes without a meaning; MXFP4 has pairs of {BLOCKS} and {SCALES}")
    return joined


def _joined(name: str, blocks: Weight, scales: Weight) -> Weight:
    if len(blocks.shape) < 3 or blocks.shape[-1] != PACKED or blocks.shape[:-1] != scales.shape:
        raise ModelError(
            f"tensor {blocks.name!r} of shape {blocks.shape}: [..., out, in / {GROUP}, {PACKED}] was expected, and the "
            f"same without the last for the scales, which have {scales.shape}"
        )
    packed = blocks.data.reshape(-1, PACKED)
    out = np.empty((len(packed), 1 + PACKED), np.uint8)
    out[:, 0] = scales.data
    first, last = packed[:, : PACKED // 2], packed[:, PACKED // 2 :]
    out[:, 1::2] = (first & 15) | (last & 15) << 4
    out[:, 2::2] = (first >> 4) | (last & 0xF0)
    return Weight(name, "mxfp4", (*scales.shape[:-1], scales.shape[-1] * GROUP), out.reshape(-1).data)

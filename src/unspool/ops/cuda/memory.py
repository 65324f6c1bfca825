"""A model's memory on a GPU, computed before torch allocates any: weights, room for a step, keys and values.

    total · gpu_memory  =  other programs  +  weights  +  workspace  +  KV cache

Nothing here imports torch, so that a plan can be made for a GPU on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from unspool.config import EngineConfig
from unspool.errors import BackendError
from unspool.ops.storage import Widths

if TYPE_CHECKING:
    from unspool.weights.weight import Weight

# Bytes per value on the device: codes, plus float16 scales and offsets per group. Other formats become bf16.
CODES = {"q4_0": 0.5, "q4_1": 0.5, "q4_k": 0.5}
CODES |= dict.fromkeys(("q8_0", "q5_0", "q5_1", "mxfp4", "q2_k", "q3_k", "q5_k", "q6_k", "fp8"), 1.0)
GROUPS = {"fp8": 4 / 128, "q8_0": 2 / 32, "q4_0": 4 / 32, "q4_1": 4 / 32, "q5_0": 2 / 32, "q5_1": 4 / 32}
GROUPS |= {"mxfp4": 2 / 32, "q2_k": 4 / 16, "q3_k": 2 / 16, "q4_k": 4 / 32, "q5_k": 4 / 32, "q6_k": 2 / 16}
ROWS = 128  # rows of a tile of codes
# The CUDA context, compiled kernels, captured graphs, partial sums of linear layers and of attention.
FIXED = 1 << 30


def weight_bytes(weights: Iterable[Weight]) -> int:
    """Bytes of the weights on the device."""
    return sum(_bytes_of(weight) for weight in weights)


def _bytes_of(weight: Weight) -> int:
    if len(weight.shape) == 1:
        return 4 * weight.shape[0]
    *experts, rows, width = weight.shape
    count = math.prod(experts)
    if weight.format not in CODES:
        return 2 * count * rows * width
    columns = 128 if CODES[weight.format] < 1 else 64
    rows, width = -(-rows // ROWS) * ROWS, -(-width // columns) * columns  # in whole tiles
    return int(count * rows * width * (CODES[weight.format] + GROUPS[weight.format]))


def workspace_bytes(widths: Widths, engine: EngineConfig) -> int:
    """Room for the rows of the largest step, for logits, and for the buffers of sampling."""
    # The stream, and the inputs and outputs of linear layers. Buffers have room for a power of two of rows, and all
    # smaller buffers together take as much as the largest.
    rows = 2 << (engine.step_tokens - 1).bit_length()
    row = 24 * widths.hidden + 6 * widths.mixer + 4 * widths.feed_forward
    # Logits, the filters' inputs and gathered tokens, counts of tokens, and bias.
    drawn = 4 * widths.vocabulary * (1 + 2 + 3)
    return FIXED + rows * row + engine.max_running * drawn


def kv_room(free: int, total: int, widths: Widths, engine: EngineConfig) -> int:
    """Bytes left for keys and values after the weights are loaded."""
    taken, workspace = total - free, workspace_bytes(widths, engine)
    room = int(engine.gpu_memory * total) - taken - workspace
    if room <= 0:
        raise BackendError(
            f"the GPU has {_gib(total)} GiB, of which {_gib(taken)} are taken, the weights among them, and a step "
            f"needs {_gib(workspace)}; gpu_memory allows {engine.gpu_memory:.0%} of it, so nothing is left for a KV "
            "cache: use a smaller or quantized model, raise gpu_memory, or lower step_tokens and max_running"
        )
    return room


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}"

"""The specification: every operation in plain numpy, float32, one row at a time.

Rows are computed one by one on purpose. A matrix product over many rows may change its order of summation with their
number; a matrix-vector product for each row cannot, so the reference keeps the first promise as the fast bodies do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from unspool.config import Activation, EngineConfig, ModelConfig
from unspool.errors import RequestError
from unspool.ops import AttentionSpec, Batch, KVCache, Rope

if TYPE_CHECKING:
    from unspool.weights.weight import Weight

Array = np.ndarray


class ReferenceKV:
    """keys and values as [layer, block, slot in block, kv head, channel]"""

    def __init__(self, config: ModelConfig, engine: EngineConfig, num_blocks: int) -> None:
        kept = engine.suited("reference").kv_dtype
        if kept not in ("f16", "f32"):
            raise RequestError(f"the reference body keeps f16 or f32 keys and values, not {kept}", "kv_dtype")
        dtype = np.float16 if kept == "f16" else np.float32
        shape = (config.num_layers, num_blocks, engine.block_size, config.num_kv_heads, config.head_dim)
        self.keys = np.zeros(shape, dtype)
        self.values = np.zeros(shape, dtype)
        self.block_size = engine.block_size
        self.num_blocks = num_blocks
        self.block_bytes = 2 * self.keys[:, 0].nbytes
        self.layout = f"reference-{kept}-{engine.block_size}"

    def copy_block(self, source: int, target: int) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def read_block(self, block: int) -> bytes:
        return self.keys[:, block].tobytes() + self.values[:, block].tobytes()

    def write_block(self, block: int, data: bytes) -> None:
        half = self.block_bytes // 2
        for array, part in ((self.keys, data[:half]), (self.values, data[half:])):
            array[:, block] = np.frombuffer(part, array.dtype).reshape(array[:, block].shape)


class ReferenceOps:
    name = "reference"
    kernel_set = "reference"

    def matrix(self, parts: Sequence[Weight]) -> Array:
        return np.concatenate([part.dequantize() for part in parts])

    def vector(self, parts: Sequence[Weight]) -> Array:
        return np.concatenate([part.dequantize() for part in parts])

    def kv_cache(self, config: ModelConfig, engine: EngineConfig, num_blocks: int) -> ReferenceKV:
        return ReferenceKV(config, engine, num_blocks)

    def compile(self, forward: Callable[[Batch, KVCache], Array], kv: KVCache) -> Callable[[Batch], Array]:
        return lambda batch: forward(batch, kv)

    def embed(self, batch: Batch, weight: Array, scale: float = 1.0) -> Array:
        return weight[batch.ids] * np.float32(scale)

    def norm(self, x: Array, weight: Array, eps: float, residual: Array | None = None) -> Array:
        y = rms_norm(x, weight, eps)
        return y if residual is None else residual + y

    def linear(self, x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None) -> Array:
        y = np.empty((len(x), len(weight)), np.float32)
        for r in range(len(x)):
            y[r] = weight @ x[r]
        if bias is not None:
            y += bias
        return y if residual is None else residual + y

    def gated(self, x: Array, weight: Array, activation: Activation) -> Array:
        gate, up = np.split(self.linear(x, weight), 2, axis=1)
        return ACTIVATIONS[activation](gate) * up

    def attention(self, qkv: Array, spec: AttentionSpec, batch: Batch, kv: KVCache) -> Array:
        assert isinstance(kv, ReferenceKV)
        q, k, v = split_heads(qkv, spec)
        if spec.q_norm is not None:
            q = rms_norm(q, spec.q_norm, spec.norm_eps)
        if spec.k_norm is not None:
            k = rms_norm(k, spec.k_norm, spec.norm_eps)
        q = rotate(q, batch.positions, spec.rope)
        k = rotate(k, batch.positions, spec.rope)
        blocks, offsets = np.divmod(batch.slots, kv.block_size)
        kv.keys[spec.layer, blocks, offsets] = k
        kv.values[spec.layer, blocks, offsets] = v

        out = np.empty_like(q)
        for s, (start, end) in enumerate(zip(batch.starts[:-1], batch.starts[1:], strict=True)):
            for r in range(start, end):
                position = int(batch.positions[r])
                first = 0 if spec.window is None else max(0, position + 1 - spec.window)
                seen = np.arange(first, position + 1)
                blocks, offsets = batch.tables[s][seen // kv.block_size], seen % kv.block_size
                keys = kv.keys[spec.layer, blocks, offsets].astype(np.float32)
                values = kv.values[spec.layer, blocks, offsets].astype(np.float32)
                out[r] = attend(q[r], keys, values, spec)
        return out.reshape(len(qkv), -1)

    def take(self, x: Array, batch: Batch) -> Array:
        return x[batch.logit_rows]

    def logits(self, x: Array, weight: Array, softcap: float | None = None) -> Array:
        y = self.linear(x, weight)
        return y if softcap is None else np.float32(softcap) * np.tanh(y / np.float32(softcap))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) may reach infinity: x / inf is the right 0
        return x / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> Array:
    return np.float32(0.5) * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": silu, "gelu_tanh": gelu_tanh}


def split_heads(qkv: Array, spec: AttentionSpec) -> tuple[Array, Array, Array]:
    """Rows of q, k and v side by side, as three arrays [row, head, channel]."""
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q, k, v = np.split(qkv, [q_width, q_width + kv_width], axis=1)
    return (
        q.reshape(len(qkv), spec.num_heads, spec.head_dim),
        k.reshape(len(qkv), spec.num_kv_heads, spec.head_dim),
        v.reshape(len(qkv), spec.num_kv_heads, spec.head_dim),
    )


def rotate(x: Array, positions: Array, rope: Rope) -> Array:
    """Turn each channel pair of x [row, head, channel] by its angle; channels past rope_dim pass through."""
    angles = positions.astype(np.float32)[:, None, None] * np.asarray(rope.inv_freq)
    cos = (np.cos(angles) * np.float32(rope.scale)).astype(np.float32)
    sin = (np.sin(angles) * np.float32(rope.scale)).astype(np.float32)
    half = len(rope.inv_freq)
    if rope.style == "interleaved":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first], x[..., second]
    turned = x.copy()
    turned[..., first] = a * cos - b * sin
    turned[..., second] = a * sin + b * cos
    return turned


def attend(q: Array, keys: Array, values: Array, spec: AttentionSpec) -> Array:
    """One row's heads [head, channel] over the keys and values [key, kv head, channel] that it sees."""
    out = np.empty_like(q)
    group = spec.num_heads // spec.num_kv_heads
    for h in range(spec.num_heads):
        scores = keys[:, h // group] @ q[h] * np.float32(spec.scale)
        if spec.softcap is not None:
            scores = np.float32(spec.softcap) * np.tanh(scores / np.float32(spec.softcap))
        weights = np.exp(scores - scores.max())
        out[h] = (weights @ values[:, h // group]) / weights.sum()
    return out

"""The specification: every operation in plain numpy, float32, one row at a time.

Rows are computed one by one on purpose. A matrix product over many rows may change its order of summation with the
number of rows; a matrix-vector product per row cannot. So the reference keeps the first promise, as fast backends do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.config import Activation, EngineConfig
from unspool.errors import EngineError, RequestError
from unspool.ops import (
    ArrayBatch,
    AttentionSpec,
    Batch,
    ConvSpec,
    ExpertWeights,
    KVCache,
    Part,
    RecurrenceSpec,
    Rope,
)
from unspool.ops.routing import Routing, choose_experts
from unspool.ops.storage import Storage, Widths, counts_of, describe, group_of_each_layer, groups_for, state_bytes

if TYPE_CHECKING:
    from unspool.weights.weight import Weight

Array = np.ndarray


class ReferenceKV:
    """For each layer, keys and values as [block, slot in block, kv head, channel], and states by name as [slot, …]."""

    def __init__(
        self, layers: Sequence[Storage], engine: EngineConfig, num_blocks: int | Sequence[int], num_states: int
    ) -> None:
        kept = engine.with_device_defaults("reference").kv_dtype
        if kept not in ("f16", "f32"):
            raise RequestError(f"the reference backend keeps f16 or f32 keys and values, not {kept}", "kv_dtype")
        dtype = np.float16 if kept == "f16" else np.float32
        self.block_size, self.num_states = engine.block_size, num_states
        self.groups = groups_for(layers, num_blocks)
        self.num_blocks = counts_of(num_blocks)
        self.group_of = group_of_each_layer(self.groups)
        self.keys: dict[int, Array] = {}
        self.values: dict[int, Array] = {}
        self.states: dict[tuple[int, str], Array] = {}
        for layer, storage in enumerate(layers):
            if storage.kv is not None:
                place = (self.num_blocks[self.group_of[layer]], engine.block_size, storage.kv.num_heads)
                self.keys[layer] = np.zeros((*place, storage.kv.key_dim), dtype)
                value_dim = 0 if storage.kv.latent else storage.kv.value_dim
                self.values[layer] = np.zeros((*place, value_dim), dtype)
            for state in storage.states:
                self.states[layer, state.name] = np.zeros((num_states, *state.shape), np.float32)
        self._arrays = [
            [*(self.keys[layer] for layer in group.layers), *(self.values[layer] for layer in group.layers)]
            for group in self.groups
        ]
        self.block_bytes = tuple(sum(array[0].nbytes for array in arrays) for arrays in self._arrays)
        self.state_bytes = state_bytes(layers)
        self.layout = f"reference-{kept}-{engine.block_size}-{describe(layers, self.groups)}"

    def copy_block(self, source: int, target: int, group: int = 0) -> None:
        for array in self._arrays[group]:
            array[target] = array[source]

    def read_block(self, block: int, group: int = 0) -> bytes:
        return b"".join(array[block].tobytes() for array in self._arrays[group])

    def write_block(self, block: int, data: bytes, group: int = 0) -> None:
        _write(self._arrays[group], block, data)

    def clear_state(self, slot: int) -> None:
        for array in self.states.values():
            array[slot] = 0

    def copy_state(self, source: int, target: int) -> None:
        for array in self.states.values():
            array[target] = array[source]

    def read_state(self, slot: int) -> bytes:
        return b"".join(array[slot].tobytes() for array in self.states.values())

    def write_state(self, slot: int, data: bytes) -> None:
        _write(self.states.values(), slot, data)


def _write(arrays: Iterable[Array], index: int, data: bytes) -> None:
    for array in arrays:
        size = array[index].nbytes
        array[index] = np.frombuffer(data[:size], array.dtype).reshape(array[index].shape)
        data = data[size:]


class ReferenceStep:
    sampling = None

    def __init__(self, forward: Callable[[Batch, KVCache], Any], kv: KVCache) -> None:
        self._forward, self._kv = forward, kv
        self._kept = np.empty((0, 0), np.float32)

    def run(self, batch: Batch) -> Array:
        result = self._forward(batch.arrays(), self._kv)
        if isinstance(result, tuple):
            result, self._kept = result
        return result

    def kept(self) -> Array:
        return self._kept


class ReferenceOps:
    name = "reference"
    kernel_set = "reference"
    loads_late = False

    def finish_loading(self, progress: Callable[[float], None] | None = None) -> None: ...

    def matrix(self, parts: Sequence[Weight]) -> Array:
        return np.concatenate([part.dequantize() for part in parts])

    def vector(self, parts: Sequence[Weight]) -> Array:
        return np.concatenate([part.dequantize().reshape(-1) for part in parts])

    def kv_cache(
        self, layers: Sequence[Storage], engine: EngineConfig, num_blocks: int | Sequence[int], num_states: int = 0
    ) -> ReferenceKV:
        return ReferenceKV(layers, engine, num_blocks, num_states)

    def kv_room(self, widths: Widths, engine: EngineConfig) -> None:
        return None

    def compile(self, forward: Callable[[Batch, KVCache], Array], kv: KVCache) -> ReferenceStep:
        return ReferenceStep(forward, kv)

    def embed(self, batch: Batch, weight: Array, scale: float = 1.0, positions: Array | None = None) -> Array:
        batch = batch.arrays()
        rows = weight[np.where(batch.ids < len(weight), batch.ids, 0)] * np.float32(scale)
        return rows if positions is None else rows + positions[batch.positions]

    def given(self, batch: Batch, width: int) -> Array:
        rows = batch.arrays().given
        if rows.size != len(batch.ids) * width:
            raise EngineError(f"given rows have {rows.size} values; the step needs {len(batch.ids) * width}")
        return rows.reshape(-1, width)

    def norm(self, x: Array, weight: Array, eps: float, residual: Array | None = None) -> Array:
        y = rms_norm(x, weight, eps)
        return y if residual is None else residual + y

    def layer_norm(
        self, x: Array, weight: Array, bias: Array | None, eps: float, residual: Array | None = None
    ) -> Array:
        y = centered_norm(x, weight, eps)
        if bias is not None:
            y = y + bias
        return y if residual is None else residual + y

    def linear(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        residual: Array | None = None,
        activation: Activation | None = None,
        scale: float = 1.0,
    ) -> Array:
        y = np.empty((len(x), len(weight)), np.float32)
        for r in range(len(x)):
            y[r] = weight @ x[r]
        if bias is not None:
            y += bias
        if activation is not None:
            y = ACTIVATIONS[activation](y)
        y = y * np.float32(scale)
        return y if residual is None else residual + y

    def gated(self, x: Array, weight: Array, activation: Activation, bias: Array | None = None) -> Array:
        gate, up = np.split(self.linear(x, weight, bias), 2, axis=1)
        if activation == "clamped_swiglu":
            gate = np.minimum(gate, 7)
            return gate / (1 + np.exp(np.float32(-1.702) * gate)) * (np.clip(up, -7, 7) + 1)
        return ACTIVATIONS[activation](gate) * up

    def multiply(self, x: Array, gate: Array, activation: Activation | None = None) -> Array:
        return x * (gate if activation is None else ACTIVATIONS[activation](gate))

    def arrange(self, x: Array, parts: Sequence[Part], weight: Array | None = None, eps: float = 0.0) -> Array:
        made, used = [], 0
        for part in parts:
            values = x[:, part.start : part.start + part.width]
            if part.norm != "copy":
                assert weight is not None
                by = weight[used : used + part.width]
                if part.norm == "scaled":
                    values = values * by
                else:
                    values = (rms_norm if part.norm == "rms" else centered_norm)(values, by, eps)
                used += part.width
            made.append(values)
        return np.concatenate(made, axis=1)

    def join(self, x: Array, y: Array) -> Array:
        return np.concatenate([x, y], axis=1)

    def add(self, x: Array, y: Array, x_scale: float = 1.0, y_scale: float = 1.0, start: int = 0) -> Array:
        out = x * np.float32(x_scale)
        out[:, start:] += np.tile(y * np.float32(y_scale), (x.shape[1] - start) // y.shape[1])
        return out

    def cut(self, x: Array, deviations: float) -> Array:
        cutoff = x.mean(axis=1, keepdims=True) + np.float32(deviations) * x.std(axis=1, keepdims=True)
        return relu(x - cutoff)

    def level(self, x: Array, like: Array, least: float) -> Array:
        parts = x.reshape(len(x), x.shape[1] // like.shape[1], like.shape[1])
        size = np.maximum(np.mean(np.square(parts), axis=2, keepdims=True), np.float32(least))
        wanted = np.mean(np.square(like), axis=1)[:, None, None]
        return np.concatenate([like, (parts * np.sqrt(wanted) / np.sqrt(size)).reshape(x.shape)], axis=1)

    def mix(self, x: Array, logits: Array, table: Array, bias: float, residual: Array) -> Array:
        part = math.isqrt(x.shape[1] * residual.shape[1] * logits.shape[1] // len(table))
        parts, out = (each.reshape(len(x), each.shape[1] // part, part) for each in (x, residual.copy()))
        table = table.reshape(out.shape[1], parts.shape[1], logits.shape[1])
        for r in range(len(x)):
            out[r] += (table @ np.tanh(logits[r]) + np.float32(bias)) @ parts[r]
        return out.reshape(residual.shape)

    def linear_heads(self, x: Array, weight: Array) -> Array:
        heads = x.reshape(len(x), len(weight), x.shape[1] // len(weight))
        y = np.empty((len(x), *weight.shape[:2]), np.float32)
        for r in range(len(x)):
            for h in range(len(weight)):
                y[r, h] = weight[h] @ heads[r, h]
        return y.reshape(len(x), weight.shape[0] * weight.shape[1])

    def experts(self, parts: Sequence[Sequence[Weight]]) -> Array:
        return np.stack([self.matrix(each) for each in parts])

    def moe(
        self, x: Array, scores: Array, routing: Routing, experts: ExpertWeights, residual: Array | None = None
    ) -> Array:
        chosen, weights = choose_experts(scores, routing)
        out = np.zeros((len(x), experts.down.shape[1]), np.float32) if residual is None else residual.copy()
        for r in range(len(x)):
            for expert, weight in zip(chosen[r], weights[r], strict=True):
                out[r] += weight * self._expert(x[r], experts, int(expert))
        return out

    def _expert(self, x: Array, experts: ExpertWeights, number: int) -> Array:
        gate_up, down = experts.gate_up[number], experts.down[number]
        bias = None if experts.gate_up_bias is None else experts.gate_up_bias.reshape(-1, len(gate_up))[number]
        inner = (
            self.gated(x[None], gate_up, experts.activation, bias)
            if experts.gated
            else self.linear(x[None], gate_up, bias, activation=experts.activation)
        )
        y = down @ inner[0]
        return y if experts.down_bias is None else y + experts.down_bias.reshape(-1, len(y))[number]

    def scale_rows(self, x: Array, logit: Array, residual: Array | None = None) -> Array:
        y = x / (1 + np.exp(-logit))
        return y if residual is None else residual + y

    def attention(self, qkv: Array, spec: AttentionSpec, batch: Batch, kv: KVCache) -> Array:
        assert isinstance(kv, ReferenceKV)
        q, k, v = split_heads(qkv, spec)
        if spec.q_norm is not None:
            q = rms_norm(q, spec.q_norm, spec.norm_eps)
        if spec.k_norm is not None and spec.stores:
            k = rms_norm(k, spec.k_norm, spec.norm_eps)
        batch = batch.arrays()
        if spec.rope is not None:
            q, k = (rotate(each, batch.positions, spec.rope) for each in (q, k))
        if spec.growth:
            steps = np.log1p(batch.positions // spec.period)
            q = q * (1 + spec.growth * steps).astype(np.float32)[:, None, None]
        group = kv.group_of[spec.layer]
        slots, tables = (np.split(each, len(kv.groups))[group] for each in (batch.slots, batch.tables))
        if spec.stores:
            blocks, offsets = np.divmod(slots, kv.block_size)
            kv.keys[spec.layer][blocks, offsets] = k
            kv.values[spec.layer][blocks, offsets] = v

        out = np.empty((len(q), spec.num_heads, spec.value_dim), np.float32)
        for s, (start, end) in enumerate(zip(batch.starts[:-1], batch.starts[1:], strict=True)):
            for r in range(start, end):
                position = int(batch.positions[r])
                first = 0 if spec.window is None else max(0, position + 1 - spec.window)
                seen = np.arange(first, position + 1)
                blocks, offsets = tables[s][seen // kv.block_size], seen % kv.block_size
                assert (blocks >= 0).all(), "a released block is read"
                keys = kv.keys[spec.layer][blocks, offsets].astype(np.float32)
                values = kv.values[spec.layer][blocks, offsets].astype(np.float32)
                if spec.latent:
                    values = keys[..., -spec.value_dim :]
                out[r] = attend(q[r], keys, values, spec)
        return out.reshape(len(qkv), -1)

    def short_conv(self, x: Array, spec: ConvSpec, batch: Batch, kv: KVCache) -> Array:
        assert isinstance(kv, ReferenceKV)
        state = kv.states[spec.layer, spec.state]
        weight = spec.weight.reshape(spec.channels, spec.taps).T
        out = np.empty((len(x), spec.channels), np.float32)

        def columns(row: Array, start: int | None) -> Any:
            return 1.0 if start is None else row[start : start + spec.channels]

        for r, past, keep in walk(batch.arrays(), state):
            inputs = np.concatenate([past, (columns(x[r], spec.start) * columns(x[r], spec.before))[None]])
            y = (inputs * weight).sum(axis=0) + (0 if spec.bias is None else spec.bias)
            if spec.activation is not None:
                y = ACTIVATIONS[spec.activation](y)
            out[r] = y * columns(x[r], spec.after)
            keep(inputs[1:])
        return out

    def recurrence(self, x: Array, gates: Array, spec: RecurrenceSpec, batch: Batch, kv: KVCache) -> Array:
        assert isinstance(kv, ReferenceKV)
        out = np.empty((len(x), spec.num_heads, spec.value_dim), np.float32)
        heads = [spec.key_head(head) for head in range(spec.num_heads)]
        for r, memory, keep in walk(batch.arrays(), kv.states[spec.layer, spec.state]):
            q_start, k_start, v_start = spec.columns
            q, k = (
                x[r, start : start + spec.num_key_heads * spec.key_dim].reshape(-1, spec.key_dim)[heads]
                for start in (q_start, k_start)
            )
            v = x[r, v_start : v_start + spec.num_heads * spec.value_dim].reshape(-1, spec.value_dim)
            steps = np.logaddexp(0, gates[r, -spec.num_heads :] + spec.bias).astype(np.float32)
            decay = np.exp(spec.rate * steps)[:, None]
            if spec.kind == "delta":
                q, k = (each / np.sqrt(np.square(each).sum(axis=1, keepdims=True) + spec.eps) for each in (q, k))
                q = q / np.float32(math.sqrt(spec.key_dim))
                beta = 1 / (1 + np.exp(-gates[r, : spec.num_heads]))
                change = beta[:, None] * (v - decay * np.einsum("hkv,hk->hv", memory, k))
            else:
                change = steps[:, None] * v
            memory = decay[:, :, None] * memory + k[:, :, None] * change[:, None, :]
            out[r] = np.einsum("hkv,hk->hv", memory, q)
            if spec.skip is not None:
                out[r] += spec.skip[:, None] * v
            keep(memory)
        return out.reshape(len(x), -1)

    def take(self, x: Array, batch: Batch) -> Array:
        return x[batch.arrays().logit_rows]

    def logits(
        self,
        x: Array,
        weight: Array,
        softcap: float | None = None,
        bias: Array | None = None,
        scale: float = 1.0,
    ) -> Array:
        y = self.linear(x, weight, bias, scale=scale)
        return y if softcap is None else np.float32(softcap) * np.tanh(y / np.float32(softcap))

    def keep(self, x: Array, rows: Array) -> tuple[Array, Array]:
        return x, rows


def walk(batch: ArrayBatch, states: Array) -> Iterator[tuple[int, Array, Callable[[Array], None]]]:
    """Yield every row, sequence by sequence, with the state before it and a function that stores the state after it."""
    for s, (start, end) in enumerate(zip(batch.starts[:-1], batch.starts[1:], strict=True)):
        slot = batch.states[s]
        if batch.positions[start] == 0:
            states[slot] = 0
        for r in range(start, end):

            def keep(state: Array, r: int = r, slot: int = slot) -> None:
                states[slot] = state
                if len(batch.saves) and batch.saves[r] >= 0:
                    states[batch.saves[r]] = state

            yield r, states[slot].copy(), keep


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def centered_norm(x: Array, weight: Array, eps: float) -> Array:
    x = x - np.mean(x, axis=-1, keepdims=True)
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(eps)) * weight


def silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) may reach infinity; x / inf is then the correct 0
        return x / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> Array:
    return np.float32(0.5) * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))


def gelu(x: Array) -> Array:
    erf = np.array([math.erf(value / math.sqrt(2)) for value in x.reshape(-1)], np.float32)
    return np.float32(0.5) * x * (1 + erf.reshape(x.shape))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu2": lambda x: np.square(relu(x)),
}


def split_heads(qkv: Array, spec: AttentionSpec) -> tuple[Array, Array, Array]:
    """Split rows of q, k and v into three arrays [row, head, channel]. k and v are empty if rows have only queries."""
    q_width, k_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q, k, v = np.split(qkv, [q_width, q_width + k_width], axis=1)
    kv_heads = spec.num_kv_heads if spec.stores else 0
    return (
        q.reshape(len(qkv), spec.num_heads, spec.head_dim),
        k.reshape(len(qkv), kv_heads, spec.head_dim),
        v.reshape(len(qkv), kv_heads, 0 if spec.latent else spec.value_dim),
    )


def rotate(x: Array, positions: Array, rope: Rope) -> Array:
    """Rotate each channel pair of x [row, head, channel] by its angle; channels past rope_dim stay unchanged."""
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
    """One row's attention: its heads [head, channel] over the keys and values [key, kv head, channel] that it sees."""
    out = np.empty((spec.num_heads, spec.value_dim), np.float32)
    group = spec.num_heads // spec.num_kv_heads
    for h in range(spec.num_heads):
        scores = keys[:, h // group] @ q[h] * np.float32(spec.scale)
        if spec.softcap is not None:
            scores = np.float32(spec.softcap) * np.tanh(scores / np.float32(spec.softcap))
        most = scores.max() if spec.sinks is None else max(scores.max(), spec.sinks[h])
        weights = np.exp(scores - most)
        total = weights.sum() if spec.sinks is None else weights.sum() + np.exp(spec.sinks[h] - most)
        out[h] = (weights @ values[:, h // group]) / total
    return out

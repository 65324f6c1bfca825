"""The least that a step of a model must read and compute: the basis of speed floors, shares and rooflines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import mul
from typing import TYPE_CHECKING

from unspool.config import EngineConfig, ModelConfig
from unspool.models.attention import Attention
from unspool.models.layers import Architecture
from unspool.models.registry import architecture_of
from unspool.ops.storage import kv_bytes_per_token, state_bytes
from unspool.records import record
from unspool.weights.weight import Weight

if TYPE_CHECKING:
    from unspool.models.checkpoint import Checkpoint

LOOKED_UP = ("token_embd.weight", "position_embd.weight", "per_layer_token_embd.weight")  # reads one row per token


@record(frozen=True)
class ExpertLayer:
    """The experts of one layer, of which each row uses a few."""

    nbytes: float
    num_experts: int
    num_used: int

    def read(self, rows: float) -> float:
        """The expected bytes that `rows` rows read, if each row chooses experts at random; a shared expert is read
        once."""
        return self.nbytes * (1 - (1 - self.num_used / self.num_experts) ** rows)


@record(frozen=True)
class Span:
    """Layers whose queries see the same number of keys: all keys, or those of a window."""

    window: int | None
    flops_per_key: float  # of one row
    kv_bytes: float  # of one token

    def keys(self, context: float) -> float:
        return context if self.window is None else min(context, self.window)


@record(frozen=True)
class StepCosts:
    """Bytes and floating-point operations of a model's steps. A multiply-add is two operations."""

    dense_bytes: int  # weights that every step reads
    experts: tuple[ExpertLayer, ...]
    row_flops: float  # of all layers' weights, for one row
    head_flops: float  # for one row of logits
    spans: tuple[Span, ...]
    state_bytes: int  # of one sequence, read and written each step

    def weight_bytes(self, rows: float = 1) -> float:
        return self.dense_bytes + sum(layer.read(rows) for layer in self.experts)

    def cache_bytes(self, context: float) -> float:
        """Bytes of keys, values and states that the next token of one sequence reads after `context` tokens."""
        return sum(span.kv_bytes * span.keys(context) for span in self.spans) + 2 * self.state_bytes

    def decode_flops(self, context: float) -> float:
        """Operations for one token of one sequence, after `context` tokens."""
        return self.row_flops + self.head_flops + sum(span.flops_per_key * span.keys(context) for span in self.spans)

    def prefill_flops(self, tokens: int, start: int = 0) -> float:
        """Operations for a prompt of `tokens` tokens after `start` others, with one row of logits."""
        return tokens * self.row_flops + self.head_flops + sum(
            span.flops_per_key * _sum_of_keys(start, tokens, span.window) for span in self.spans
        )

    def step_flops(self, starts: Sequence[int], counts: Sequence[int], num_logits: int) -> float:
        """Operations for a step of several sequences: each computes `counts` tokens after its `starts` tokens."""
        total = sum(counts) * self.row_flops + num_logits * self.head_flops
        for span in self.spans:
            if span.window is None:
                keys = sum(map(mul, starts, counts)) + (sum(map(mul, counts, counts)) + sum(counts)) / 2
            else:
                keys = sum(map(_sum_of_keys, starts, counts, repeat(span.window)))
            total += span.flops_per_key * keys
        return total


def _sum_of_keys(start: int, tokens: int, window: int | None) -> float:
    """The sum over rows start, start + 1, … of the keys that each sees, itself included."""
    def whole(n: int) -> float:  # of the rows before n
        if window is None or n <= window:
            return n * (n + 1) / 2
        return window * (window + 1) / 2 + (n - window) * window

    return whole(start + tokens) - whole(start)


def step_costs(
    config: ModelConfig,
    weights: Iterable[Weight],
    kv_bytes: float,
    held: Callable[[Weight], float] = lambda weight: weight.nbytes,
) -> StepCosts:
    """`kv_bytes`: per token, in all layers; `held`: the bytes that a weight takes in the backend's memory."""
    architecture = architecture_of(config)
    tied = config.tied_embeddings
    routed = {
        index: layer.ffn.routing
        for index, layer in enumerate(architecture.layers)
        if layer.ffn is not None and layer.ffn.routing is not None
    }
    dense, row, head, experts = 0.0, 0.0, 0.0, dict.fromkeys(routed, 0.0)
    for weight in weights:
        size, nbytes = math.prod(weight.shape), held(weight)
        is_head = weight.name == ("token_embd.weight" if tied else "output.weight")
        layer = _expert_layer(weight)
        if layer in routed:
            experts[layer] += nbytes
            row += 2 * size * routed[layer].num_used / routed[layer].num_experts
        elif is_head:
            dense, head = dense + nbytes, 2.0 * size
        elif weight.name not in LOOKED_UP:
            dense, row = dense + nbytes, row + (2 * size if len(weight.shape) > 1 else 0)
    return StepCosts(
        int(dense),
        tuple(ExpertLayer(n, routed[index].num_experts, routed[index].num_used) for index, n in experts.items()),
        row,
        head,
        _spans(config, architecture, kv_bytes),
        state_bytes(architecture.storage),
    )


def costs_of(checkpoint: Checkpoint, engine: EngineConfig, backend: str) -> StepCosts:
    """What the steps of a loaded model read and compute, given how a backend of `ops` stores weights and cache."""
    storage, on_cuda = architecture_of(checkpoint.config).storage, backend == "cuda"
    kv_bytes = kv_bytes_per_token(storage, engine.kv_dtype, keys_alone=on_cuda)
    if not on_cuda:
        return step_costs(checkpoint.config, checkpoint.weights.values(), kv_bytes)

    from unspool.ops.cuda.memory import weight_bytes

    return step_costs(checkpoint.config, checkpoint.weights.values(), kv_bytes, lambda weight: weight_bytes([weight]))


def _expert_layer(weight: Weight) -> int | None:
    """The layer whose experts this tensor has; None if it has none."""
    parts = weight.name.split(".")
    is_expert = len(parts) > 2 and parts[0] == "blk" and parts[2].endswith("_exps")
    return int(parts[1]) if is_expert else None


def _spans(config: ModelConfig, architecture: Architecture, kv_bytes: float) -> tuple[Span, ...]:
    storage = architecture.storage
    values = sum(layer.kv.values_per_token for layer in storage if layer.kv is not None)
    per_value = kv_bytes / values if values else 0.0
    flops: dict[int | None, float] = {}
    nbytes: dict[int | None, float] = {}
    for layer, kept in zip(architecture.layers, storage, strict=True):
        mixer, kv = layer.mixer, kept.kv
        if isinstance(mixer, Attention):
            heads, dims, window = mixer.num_heads, mixer.head_dim + (mixer.value_dim or mixer.head_dim), mixer.window
        elif kv is not None:
            heads, dims, window = config.num_heads, kv.key_dim + kv.value_dim, kv.window
        else:
            continue  # its work does not grow with the context
        source = mixer.kv_layer if isinstance(mixer, Attention) else None
        read = kv if source is None else storage[source].kv
        flops[window] = flops.get(window, 0.0) + 2.0 * heads * dims
        nbytes[window] = nbytes.get(window, 0.0) + (0 if read is None else read.values_per_token * per_value)
    return tuple(Span(window, flops[window], nbytes[window]) for window in flops)

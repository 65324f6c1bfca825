"""The blocks that decoder models are built of. A family states only how it differs: see llama.py, qwen.py, gemma.py."""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from unspool.config import ModelConfig, RopeScaling
from unspool.errors import ModelError
from unspool.ops import AttentionSpec, Batch, KVCache, Matrix, Ops, Rope, Rows, Vector
from unspool.weights.weight import Weight


class Shelf:
    """A checkpoint's tensors, taken by name and expected shape; what is missing or left over is an error."""

    def __init__(self, ops: Ops, weights: Mapping[str, Weight]) -> None:
        self.ops = ops
        self._weights = weights
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def matrix(self, *wanted: tuple[str, int, int]) -> Matrix:
        """One prepared matrix from (name, out_features, in_features) parts that share their input."""
        return self.ops.matrix(self._take([(name, (rows, columns)) for name, rows, columns in wanted]))

    def vector(self, *wanted: tuple[str, int]) -> Vector:
        return self.ops.vector(self._take([(name, (size,)) for name, size in wanted]))

    def floats(self, name: str, size: int) -> array[float]:
        return self._take([(name, (size,))])[0].floats()

    def _take(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[Weight]:
        parts = []
        for name, shape in wanted:
            if name not in self._weights:
                raise ModelError(f"tensor {name} is missing")
            part = self._weights[name]
            if part.shape != shape:
                raise ModelError(f"tensor {name} has shape {list(part.shape)}; the model needs {list(shape)}")
            self._taken.add(name)
            parts.append(part)
        return parts

    def finish(self) -> None:
        left = sorted(set(self._weights) - self._taken)
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(f"tensor {left[0]}{more} has no place in this architecture")


class Attention:
    """x + W_o · attend(rotate(W_qkv · norm(x)))"""

    def __init__(self, model: Decoder, shelf: Shelf, layer: int) -> None:
        c, prefix = model.config, f"blk.{layer}"
        q_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.ops, self.eps = shelf.ops, c.norm_eps
        self.norm = shelf.vector((f"{prefix}.attn_norm.weight", c.hidden_size))
        self.qkv = shelf.matrix(
            (f"{prefix}.attn_q.weight", q_width, c.hidden_size),
            (f"{prefix}.attn_k.weight", kv_width, c.hidden_size),
            (f"{prefix}.attn_v.weight", kv_width, c.hidden_size),
        )
        self.bias = None
        if model.qkv_bias:
            self.bias = shelf.vector(
                (f"{prefix}.attn_q.bias", q_width),
                (f"{prefix}.attn_k.bias", kv_width),
                (f"{prefix}.attn_v.bias", kv_width),
            )
        self.output = shelf.matrix((f"{prefix}.attn_output.weight", c.hidden_size, q_width))
        self.post_norm = None
        if model.post_norms:
            self.post_norm = shelf.vector((f"{prefix}.post_attention_norm.weight", c.hidden_size))
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            scale=c.attention_scale or 1 / math.sqrt(c.head_dim),
            rope=model.rope(layer),
            window=model.window(layer),
            softcap=c.attention_softcap,
            q_norm=shelf.vector((f"{prefix}.attn_q_norm.weight", c.head_dim)) if model.qk_norm else None,
            k_norm=shelf.vector((f"{prefix}.attn_k_norm.weight", c.head_dim)) if model.qk_norm else None,
            norm_eps=c.norm_eps,
        )

    def __call__(self, x: Rows, batch: Batch, kv: KVCache) -> Rows:
        ops = self.ops
        qkv = ops.linear(ops.norm(x, self.norm, self.eps), self.qkv, self.bias)
        mixed = ops.attention(qkv, self.spec, batch, kv)
        if self.post_norm is None:
            return ops.linear(mixed, self.output, residual=x)
        return ops.norm(ops.linear(mixed, self.output), self.post_norm, self.eps, residual=x)


class FeedForward:
    """x + W_down · (act(W_gate · norm(x)) · (W_up · norm(x)))"""

    def __init__(self, model: Decoder, shelf: Shelf, layer: int) -> None:
        c, prefix = model.config, f"blk.{layer}"
        self.ops, self.eps, self.activation = shelf.ops, c.norm_eps, c.activation
        self.norm = shelf.vector((f"{prefix}.ffn_norm.weight", c.hidden_size))
        self.gate_up = shelf.matrix(
            (f"{prefix}.ffn_gate.weight", c.intermediate_size, c.hidden_size),
            (f"{prefix}.ffn_up.weight", c.intermediate_size, c.hidden_size),
        )
        self.down = shelf.matrix((f"{prefix}.ffn_down.weight", c.hidden_size, c.intermediate_size))
        self.post_norm = None
        if model.post_norms:
            self.post_norm = shelf.vector((f"{prefix}.post_ffw_norm.weight", c.hidden_size))

    def __call__(self, x: Rows) -> Rows:
        ops = self.ops
        inner = ops.gated(ops.norm(x, self.norm, self.eps), self.gate_up, self.activation)
        if self.post_norm is None:
            return ops.linear(inner, self.down, residual=x)
        return ops.norm(ops.linear(inner, self.down), self.post_norm, self.eps, residual=x)


class Decoder:
    """Embedding, layers of attention and feed-forward, norm, head. Subclasses state how their family differs."""

    qkv_bias = False  # q, k and v have biases
    qk_norm = False  # q and k are normed per head before they are rotated
    post_norms = False  # a norm after each block too, before its residual is added

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], ops: Ops) -> None:
        self.config, self.ops = config, ops
        shelf = Shelf(ops, weights)
        self._freq_factors = None
        if "rope_freqs.weight" in shelf:
            self._freq_factors = shelf.floats("rope_freqs.weight", config.rope_dim // 2)
        self._ropes: dict[float, Rope] = {}
        self.embedding = shelf.matrix(("token_embd.weight", config.vocab_size, config.hidden_size))
        self.layers = [(Attention(self, shelf, i), FeedForward(self, shelf, i)) for i in range(config.num_layers)]
        self.norm = shelf.vector(("output_norm.weight", config.hidden_size))
        self.head = self.embedding
        if not config.tied_embeddings:
            self.head = shelf.matrix(("output.weight", config.vocab_size, config.hidden_size))
        shelf.finish()

    def early(self, num_layers: int) -> Decoder:
        """This model cut short: its first layers, then its norm and head. Weights are shared."""
        cut = copy.copy(self)
        cut.config = replace(self.config, num_layers=num_layers)
        cut.layers = self.layers[:num_layers]
        return cut

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees; every `sliding_pattern`-th layer sees all of them."""
        pattern = self.config.sliding_pattern
        is_global = pattern is not None and (layer + 1) % pattern == 0
        return None if is_global else self.config.sliding_window

    def rope(self, layer: int) -> Rope:
        theta = self.config.rope_theta
        is_local = self.config.rope_theta_local is not None and self.window(layer) is not None
        if is_local:
            theta = self.config.rope_theta_local or theta
        if theta not in self._ropes:
            self._ropes[theta] = make_rope(self.config, theta, self._freq_factors, scaled=not is_local)
        return self._ropes[theta]

    def __call__(self, batch: Batch, kv: KVCache) -> Rows:
        ops = self.ops
        x = ops.embed(batch, self.embedding, self.config.embedding_scale)
        for attention, feed_forward in self.layers:
            x = attention(x, batch, kv)
            x = feed_forward(x)
        x = ops.norm(ops.take(x, batch), self.norm, self.config.norm_eps)
        return ops.logits(x, self.head, self.config.logit_softcap)


def make_rope(config: ModelConfig, theta: float, factors: Sequence[float] | None, *, scaled: bool) -> Rope:
    """Rotation speeds theta^(-2i/d), slowed as the model's scaling says."""
    pairs = range(config.rope_dim // 2)
    speeds = [1.0 / theta ** (i * 2 / config.rope_dim) for i in pairs]
    if factors is not None:
        speeds = [speed / factor for speed, factor in zip(speeds, factors, strict=True)]
    scale = 1.0
    scaling = config.rope_scaling if scaled else None
    if scaling is not None and scaling.kind == "linear":
        speeds = [speed / scaling.factor for speed in speeds]
    elif scaling is not None and scaling.kind == "llama3":
        speeds = [_slowed_by_wavelength(speed, scaling) for speed in speeds]
    elif scaling is not None and scaling.kind == "yarn":
        speeds = _slowed_by_ramp(speeds, theta, scaling)
        scale = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    return Rope(array("f", speeds), config.rope_style, scale)


def _slowed_by_wavelength(speed: float, scaling: RopeScaling) -> float:
    wavelength = 2 * math.pi / speed
    if wavelength > scaling.original_context / scaling.low_freq_factor:
        return speed / scaling.factor
    if wavelength < scaling.original_context / scaling.high_freq_factor:
        return speed
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * speed / scaling.factor + smooth * speed


def _slowed_by_ramp(speeds: Sequence[float], theta: float, scaling: RopeScaling) -> list[float]:
    half = len(speeds)

    def turns_at(turns: float) -> float:  # the channel pair that makes this many turns over the trained context
        return half * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(theta)

    low_pair = max(0.0, math.floor(turns_at(scaling.beta_fast)))
    high_pair = min(half - 1.0, math.ceil(turns_at(scaling.beta_slow)))
    width = max(high_pair - low_pair, 0.001)
    ramp = [min(max((i - low_pair) / width, 0), 1) for i in range(half)]
    return [speed / scaling.factor * r + speed * (1 - r) for speed, r in zip(speeds, ramp, strict=True)]

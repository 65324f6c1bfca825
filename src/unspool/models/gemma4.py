"""Gemma 4: Gemma 3 with normed values, wider heads in global layers, which rotate only some channels, keys and values
that the last layers share, per-layer inputs of each token, and experts in addition to the feed-forward.

Hugging Face and GGUF store norms the same way.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.models import expert_config, gguf_keys, hf_keys
from unspool.models.blocks import FeedForwardFunction, Place
from unspool.models.expert_config import ExpertConfig
from unspool.models.family import IN_LAYER, WHOLE, Family
from unspool.models.layers import Architecture, Attention, FeedForward, Glu, Layer, RmsNorm, TokenInput, TokenInputs
from unspool.models.limits import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_INTERMEDIATE,
    MAX_THETA,
    MAX_WIDTH,
    every_nth_is_global,
)
from unspool.models.moe import Moe
from unspool.models.qwen2 import TINY_QWEN2
from unspool.models.rotary import Rotary
from unspool.ops import Rows
from unspool.ops.routing import Routing
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight

PATTERN = 6  # five sliding layers, then a global one
THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
TURNING = 0.25  # share of rotated channels in a global layer
STANDS = 1e30  # GGUF's frequency divisor for a pair that is not rotated


@record(frozen=True)
class Gemma4Config(ExpertConfig):
    """`head_dim` and `num_kv_heads` are those of sliding layers; `intermediate_size` is that of layers with their own
    keys."""

    global_head_dim: int = 0
    global_kv_heads: int = 0
    turning_pairs: int = 0  # rotated channel pairs in a global layer
    rope_theta_local: float = LOCAL_THETA
    keys_are_values: bool = False  # in global layers
    shared_layers: int = 0  # the last layers, which read keys and values of earlier layers
    wide_width: int = 0  # feed-forward width of those layers
    token_width: int = 0  # width of each layer's per-token inputs; 0: there are none
    fused_experts: bool = True
    logit_softcap: float | None = None

    def is_global(self, layer: int) -> bool:
        return self.window(layer) is None

    def kv_layer(self, layer: int) -> int | None:
        """The layer whose keys and values a layer reads; None: its own."""
        first = self.num_layers - self.shared_layers
        if layer < first:
            return None
        return max(each for each in range(first) if self.is_global(each) == self.is_global(layer))


@record(frozen=True)
class ExpertsBesideGlu:
    """norm(glu(norm(x))) + norm(experts(norm(x))); each norm has its own weights, and x is not normed before."""

    glu: Glu
    experts: Moe
    norm: RmsNorm

    @property
    def routing(self) -> Routing:
        return self.experts.routing

    def row_width(self, hidden: int) -> int:
        return max(self.glu.row_width(hidden), self.experts.row_width(hidden))

    def bind(self, place: Place) -> FeedForwardFunction:
        ops, hidden, count = place.ops, place.hidden, self.experts.routing.num_experts
        names = ("ffn_norm", "post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")
        before, after, experts_before, experts_after = (
            self.norm.bind(place.reader, f"blk.{place.layer}.{name}", hidden) for name in names
        )
        glu, experts = self.glu.bind(place), self.experts.bind_experts(place)
        router, scale = place.matrix(("ffn_gate_inp", count, hidden)), place.vector(("ffn_gate_inp.scale", hidden))
        routing = replace(self.experts.routing, expert_scale=place.vector(("ffn_down_exps.scale", count)))

        def forward(x: Rows, residual: Rows | None) -> Rows:
            scores = ops.linear(ops.norm(x, scale, self.norm.eps), router, scale=1 / math.sqrt(hidden))
            routed = ops.moe(experts_before(x, None), scores, routing, experts, None)
            both = experts_after(routed, after(glu(before(x, None), None), None))
            assert residual is None  # a norm follows
            return both

        return forward


TINY_GEMMA4 = Gemma4Config(
    **vars(TINY_QWEN2)
    | {"architecture": "gemma4", "activation": "gelu_tanh", "num_layers": 6, "num_kv_heads": 1, "qkv_bias": False}
    | {"rope_theta": THETA, "sliding_window": 24, "sliding_layers": every_nth_is_global(3, 6)},
    global_head_dim=32,
    global_kv_heads=1,
    turning_pairs=4,
    shared_layers=3,
    wide_width=192,
    token_width=32,
    logit_softcap=30.0,
)
TINY_GEMMA4_MOE = replace(
    TINY_GEMMA4, num_experts=8, num_used_experts=3, expert_width=64, num_kv_heads=2, keys_are_values=True,
    shared_layers=0, wide_width=0, token_width=0,
)  # fmt: skip

GEMMA4_E2B = Gemma4Config(
    architecture="gemma4",
    num_layers=35,
    hidden_size=1536,
    num_heads=8,
    num_kv_heads=1,
    head_dim=256,
    intermediate_size=6144,
    vocab_size=262_144,
    context_length=131_072,
    norm_eps=1e-6,
    rope_dim=256,
    rope_theta=THETA,
    tied_embeddings=True,
    activation="gelu_tanh",
    sliding_window=512,
    sliding_layers=every_nth_is_global(5, 35),
    global_head_dim=512,
    global_kv_heads=1,
    turning_pairs=64,
    shared_layers=20,
    wide_width=12_288,
    token_width=256,
    logit_softcap=30.0,
)


class Gemma4(Family):
    gguf_activation = "gelu_tanh"
    shapes = {"gemma4-e2b": GEMMA4_E2B, "tiny-gemma4": TINY_GEMMA4, "tiny-gemma4-moe": TINY_GEMMA4_MOE}
    whole_names = WHOLE | {
        "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
        "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
        "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    }
    layer_names = IN_LAYER | {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
        "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
        "router.proj.weight": "ffn_gate_inp.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
        "per_layer_input_gate.weight": "inp_gate.weight",
        "per_layer_projection.weight": "proj.weight",
        "post_per_layer_input_norm.weight": "post_norm.weight",
        "layer_scalar": "layer_output_scale.weight",
    }

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        if fields.get("use_bidirectional_attention") == "all":
            fields.fail("use_bidirectional_attention", "attention that looks ahead is not supported")
        common = hf_keys.common(
            fields, name, rotates=False, head_dim=256, tied_embeddings=True, activation="gelu_pytorch_tanh"
        )
        layers = common["num_layers"]
        sliding = hf_keys.sliding_layers(fields, layers) or every_nth_is_global(PATTERN, layers)
        sliding = (*sliding[:-1], False)
        shared = fields.integer("num_kv_shared_layers", 0, low=0, high=layers - 1)
        wide = fields.boolean("use_double_wide_mlp", False)
        config = Gemma4Config(
            **common | {"rope_dim": common["head_dim"], "rope_theta": THETA},
            **_experts_from_hf(fields),
            sliding_window=fields.integer("sliding_window", 512, high=MAX_CONTEXT),
            sliding_layers=sliding,
            keys_are_values=fields.boolean("attention_k_eq_v", False),
            shared_layers=shared,
            wide_width=common["intermediate_size"] * (2 if wide else 1) if shared else 0,
            token_width=fields.integer("hidden_size_per_layer_input", 256, low=0, high=MAX_WIDTH),
            logit_softcap=fields.optional_number("final_logit_softcapping", low=0, high=1e6),
        )
        return self._checked(fields, _with_positions(fields, _with_global_heads(fields, config)))

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        layers = keys.integer("block_count", high=1024)
        widths = gguf_keys.numbers_of_layers(keys, "feed_forward_length", layers, MAX_INTERMEDIATE)
        single = {"feed_forward_length": widths[0], "attention.head_count_kv": 1}
        values = dict(keys.values) | {f"{keys.prefix}{key}": value for key, value in single.items()}
        plain = Fields(keys.source, values, keys.prefix)
        common = gguf_keys.common(plain, file, experts=True)
        sliding = gguf_keys.sliding_layers(keys, layers) or every_nth_is_global(PATTERN, layers)
        heads = gguf_keys.numbers_of_layers(keys, "attention.head_count_kv", layers, MAX_HEADS)
        local = [count for count, slides in zip(heads, sliding, strict=True) if slides]
        world = [layer for layer, slides in enumerate(sliding) if not slides]
        shared = keys.integer("attention.shared_kv_layers", 0, low=0, high=layers - 1)
        own: dict[str, Any] = {
            "num_kv_heads": local[0] if local else heads[0],
            "head_dim": keys.integer("attention.key_length_swa", common["head_dim"], high=MAX_HEAD_DIM),
            "activation": self.gguf_activation,
            "sliding_layers": sliding,
        }
        own["rope_dim"] = own["head_dim"]
        config = Gemma4Config(
            **common | own,
            **expert_config.from_gguf(plain) if keys.integer("expert_count", 0, low=0) else {},
            global_head_dim=common["head_dim"],
            global_kv_heads=heads[world[0]] if world else own["num_kv_heads"],
            turning_pairs=_turning(file, common["head_dim"] // 2),
            rope_theta_local=keys.number("rope.freq_base_swa", LOCAL_THETA, low=1, high=MAX_THETA),
            keys_are_values=bool(world) and f"blk.{world[0]}.attn_v.weight" not in file.tensors,
            shared_layers=shared,
            wide_width=widths[-1] if shared else 0,
            token_width=keys.integer("embedding_length_per_layer_input", 0, low=0, high=MAX_WIDTH),
            fused_experts="blk.0.ffn_gate_up_exps.weight" in file.tensors or not keys.get("expert_count"),
            logit_softcap=keys.optional_number("final_logit_softcapping", low=0, high=1e6),
        )
        return self._checked(keys, config)

    def _checked(self, fields: Fields, config: Gemma4Config) -> Gemma4Config:
        first = config.num_layers - config.shared_layers
        own = {config.is_global(layer) for layer in range(first)}
        if any(config.is_global(layer) not in own for layer in range(first, config.num_layers)):
            fields.fail("num_kv_shared_layers", "no layer of that kind has keys and values of its own")
        if config.num_heads % config.global_kv_heads:
            fields.fail("num_global_key_value_heads", f"{config.num_heads} heads cannot share {config.global_kv_heads}")
        return config

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, Gemma4Config)
        layers = range(config.num_layers)
        shared = config.num_layers - config.shared_layers
        values = gguf_keys.common_keys(replace(config, head_dim=config.global_head_dim)) | {
            "attention.head_count_kv": [
                config.global_kv_heads if config.is_global(layer) else config.num_kv_heads for layer in layers
            ],
            "attention.key_length_swa": config.head_dim,
            "attention.value_length_swa": config.head_dim,
            "attention.shared_kv_layers": config.shared_layers,
            "embedding_length_per_layer_input": config.token_width,
            "feed_forward_length": [
                config.intermediate_size if layer < shared else config.wide_width for layer in layers
            ],
            "rope.freq_base_swa": config.rope_theta_local,
            "rope.dimension_count": config.global_head_dim,
            "rope.dimension_count_swa": config.head_dim,
        }
        if config.num_experts:
            values |= expert_config.gguf_keys(config)
        if config.logit_softcap is not None:
            values["final_logit_softcapping"] = config.logit_softcap
        return values

    def gguf_tensors(self, config: ModelConfig) -> dict[str, array[float]]:
        assert isinstance(config, Gemma4Config)
        standing = config.global_head_dim // 2 - config.turning_pairs
        return {gguf_keys.FACTORS: array("f", [1.0] * config.turning_pairs + [STANDS] * standing)}

    def ignores(self, name: str, config: ModelConfig) -> bool:
        assert isinstance(config, Gemma4Config)
        return name == gguf_keys.FACTORS or is_shared_key(name, config)

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        assert isinstance(config, Gemma4Config)
        found = super().canonical_weights(name, weight, config)
        return [each for each in found if not is_shared_key(each.name, config)]

    # Layers ----------------------------------------------------------------------------------------------------------
    def architecture(self, config: ModelConfig) -> Architecture:
        assert isinstance(config, Gemma4Config)
        return replace(
            super().architecture(config),
            embedding_scale=math.sqrt(config.hidden_size),
            logit_softcap=config.logit_softcap,
            token_inputs=TokenInputs(config.token_width) if config.token_width else None,
        )

    def layer(self, config: ModelConfig, index: int) -> Layer:
        assert isinstance(config, Gemma4Config)
        norm, width = RmsNorm(config.norm_eps), config.token_width
        return Layer(
            self.attention(config, index),
            self.feed_forward(config, index),
            norm=norm,
            post_norm=norm,
            ffn_norm=None if config.num_experts else norm,
            ffn_post_norm=norm,
            token_input=TokenInput(width, config.activation, norm) if width else None,
            scaled=True,
        )

    def attention(self, config: ModelConfig, index: int) -> Attention:
        assert isinstance(config, Gemma4Config)
        norm, is_global = RmsNorm(config.norm_eps), config.is_global(index)
        return replace(
            super().attention(config, index),
            head_dim=config.global_head_dim if is_global else config.head_dim,
            num_kv_heads=config.global_kv_heads if is_global else config.num_kv_heads,
            scale=1.0,
            qk_norm=norm,
            v_norm=replace(norm, weight=False),
            keys_are_values=config.keys_are_values and is_global,
            kv_layer=config.kv_layer(index),
        )

    def rotary(self, config: ModelConfig, index: int) -> Rotary:
        assert isinstance(config, Gemma4Config)
        if config.is_global(index):
            return Rotary(config.global_head_dim, config.rope_theta, config.rope_style, turning=config.turning_pairs)
        return Rotary(config.head_dim, config.rope_theta_local, config.rope_style)

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, Gemma4Config)
        is_shared = index >= config.num_layers - config.shared_layers
        glu = Glu(config.wide_width if is_shared else config.intermediate_size, config.activation)
        if not config.num_experts:
            return glu
        routing = Routing(config.num_experts, config.num_used_experts)
        experts = Moe(routing, config.expert_width, config.activation, fused=config.fused_experts)
        return ExpertsBesideGlu(glu, experts, RmsNorm(config.norm_eps))


def _experts_from_hf(fields: Fields) -> dict[str, Any]:
    if not fields.boolean("enable_moe_block", False):
        return {}
    experts = fields.integer("num_experts", high=MAX_EXPERTS)
    return {
        "num_experts": experts,
        "num_used_experts": fields.integer("top_k_experts", high=experts),
        "expert_width": fields.integer("moe_intermediate_size", high=MAX_INTERMEDIATE),
    }


def _with_global_heads(fields: Fields, config: Gemma4Config) -> Gemma4Config:
    """Sizes of global layers: from separate fields, or from an object with the differences of each layer."""
    size = fields.integer("global_head_dim", 512, high=MAX_HEAD_DIM)
    heads = fields.integer("num_global_key_value_heads", config.num_kv_heads, high=MAX_HEADS)
    layers = fields.object("per_layer_config")
    world = [layer for layer in range(config.num_layers) if config.is_global(layer)]
    own = None if layers is None or not world else layers.object(str(world[0]))
    if own is not None:
        size = own.integer("head_dim", size, high=MAX_HEAD_DIM)
        heads = own.integer("num_key_value_heads", heads, high=MAX_HEADS)
    elif not config.keys_are_values:
        heads = config.num_kv_heads
    return replace(config, global_head_dim=size, global_kv_heads=heads)


def _with_positions(fields: Fields, config: Gemma4Config) -> Gemma4Config:
    parameters = fields.object("rope_parameters")
    whole = None if parameters is None else parameters.object("full_attention")
    local = None if parameters is None else parameters.object("sliding_attention")
    theta, local_theta, share = THETA, LOCAL_THETA, TURNING
    if whole is not None:
        if whole.string("rope_type", "proportional") != "proportional":
            whole.fail("rope_type", "only proportional is supported in global layers")
        if whole.number("factor", 1.0, low=0, high=1e6) != 1:
            whole.fail("factor", "only 1 is supported")
        theta = whole.number("rope_theta", theta, low=1, high=MAX_THETA)
        share = whole.number("partial_rotary_factor", 1.0, low=0, high=1)
    if local is not None:
        if local.string("rope_type", "default") != "default":
            local.fail("rope_type", "only default is supported in sliding layers")
        local_theta = local.number("rope_theta", local_theta, low=1, high=MAX_THETA)
    turning = int(share * config.global_head_dim // 2)
    return replace(config, rope_theta=theta, rope_theta_local=local_theta, turning_pairs=turning)


def _turning(file: GGUFFile, pairs: int) -> int:
    """The number of a global layer's pairs that are rotated: the divisors of the others are huge."""
    factors = file.tensors.get(gguf_keys.FACTORS)
    return pairs if factors is None else sum(each < STANDS / 2 for each in factors.floats()[:pairs])


def is_shared_key(name: str, config: Gemma4Config) -> bool:
    """Whether a tensor holds keys or values of a layer that reads another layer's. Some files have such tensors."""
    prefix, _, rest = name.partition(".")
    layer, _, tensor = rest.partition(".")
    if prefix != "blk" or not layer.isdecimal() or int(layer) < config.num_layers - config.shared_layers:
        return False
    return tensor.startswith(("attn_k.", "attn_v.", "attn_k_norm."))


FAMILY = Gemma4()

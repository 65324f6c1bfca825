"""Granite 4: Mamba-2 in most layers, attention without rotation in the others; dense, or with experts and a shared
expert. Models whose layers are all attention differ from Granite 3 only in their tensors' names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.models import expert_config, gguf_keys, hf_keys, hybrid, mamba
from unspool.models.granite import SHARED_WIDTH, GraniteConfig, multipliers_from_gguf, multipliers_from_hf
from unspool.models.granite_moe import GraniteMoe, GraniteMoeConfig
from unspool.models.layers import FeedForward, Glu, Layer
from unspool.models.limits import MAX_HEADS, MAX_INTERMEDIATE
from unspool.models.mamba import MambaConfig
from unspool.models.rotary import Rotary
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight

KV_HEADS = "attention.head_count_kv"
HF_KEYS = {
    "head_dim": "mamba_d_head",
    "state_dim": "mamba_d_state",
    "groups": "mamba_n_groups",
    "taps": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
}
SCANS = ("mamba", "linear_attention")  # older and newer name of the same kind of layer
KINDS = (*SCANS, "attention", "full_attention")


@record(frozen=True)
class GraniteHybridConfig(GraniteMoeConfig, MambaConfig):
    """Without experts, `num_experts` is 0 and `intermediate_size` is the width of the feed-forward."""

    attention_layers: tuple[bool, ...] = ()


GRANITE_4_H_350M = GraniteHybridConfig(
    architecture="granite_hybrid",
    num_layers=32,
    hidden_size=768,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=2048,
    vocab_size=100_352,
    context_length=32_768,
    norm_eps=1e-5,
    rope_style="interleaved",
    tied_embeddings=True,
    embedding_multiplier=12.0,
    residual_multiplier=0.246,
    attention_multiplier=0.015625,
    logit_divisor=3.0,
    mamba_heads=48,
    mamba_head_dim=32,
    mamba_state_dim=128,
    attention_layers=tuple(layer in (10, 13, 17, 27) for layer in range(32)),
)
# Granite-4.0-H-Tiny
GRANITE_4_H_TINY = replace(
    GRANITE_4_H_350M, num_layers=40, hidden_size=1536, num_heads=12, num_kv_heads=4, head_dim=128,
    intermediate_size=512, context_length=131_072, residual_multiplier=0.22, attention_multiplier=0.0078125,
    logit_divisor=6.0, mamba_heads=48, mamba_head_dim=64, num_experts=64, num_used_experts=6, expert_width=512,
    shared_width=1024, attention_layers=tuple(layer in (5, 15, 25, 35) for layer in range(40)),
)  # fmt: skip
TINY_HYBRID = replace(
    GRANITE_4_H_350M, num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64,
    vocab_size=288, context_length=256, attention_multiplier=0.2, mamba_heads=8, mamba_head_dim=16, mamba_state_dim=16,
    mamba_groups=2, num_experts=8, num_used_experts=3, expert_width=64, shared_width=96,
    attention_layers=(False, True, False),
)  # fmt: skip


class GraniteHybrid(GraniteMoe):
    shapes = {
        "granite-4-h-350m": GRANITE_4_H_350M,
        "granite-4-h-tiny": GRANITE_4_H_TINY,
        "tiny-granite-hybrid": TINY_HYBRID,
        "tiny-granite-hybrid-dense": replace(
            TINY_HYBRID, num_experts=0, num_used_experts=0, expert_width=0, shared_width=0
        ),
    }
    layer_names = GraniteMoe.layer_names | mamba.names("mamba.")

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        layers = fields.integer("num_hidden_layers", high=1024)
        kinds = ("linear_attention",) * layers
        if fields.get("layer_types") is not None or fields.get("layers_block_type") is not None:
            key = "layer_types" if fields.get("layer_types") is not None else "layers_block_type"
            kinds = tuple(hybrid.kinds_of(fields, key, layers, KINDS))
        if not any(kind in SCANS for kind in kinds):
            return super().from_hf(fields, "granite_moe") if _experts(fields) else _dense(fields)
        rotates = fields.optional_string("position_embedding_type") == "rope"
        common = hf_keys.common(fields, name, rotates=rotates)
        experts: dict[str, Any] = {}
        shared = fields.integer(SHARED_WIDTH, 1024, high=MAX_INTERMEDIATE)
        if _experts(fields):
            experts = expert_config.from_hf(fields, layers, width="intermediate_size") | {"shared_width": shared}
        else:
            common["intermediate_size"] = shared
        heads = fields.integer("mamba_n_heads", 128, high=MAX_HEADS)
        return GraniteHybridConfig(
            **common,
            **experts,
            **multipliers_from_hf(fields),
            **mamba.from_hf(_with_head_dim(fields, common["hidden_size"], heads), HF_KEYS, heads),
            attention_layers=tuple(kind not in SCANS for kind in kinds),
        )

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        kv_heads = hybrid.by_layer(keys, KV_HEADS, keys.integer("block_count"))
        plain = hybrid.with_values(keys, {KV_HEADS: max(kv_heads) or None})
        common = gguf_keys.common(
            plain,
            file,
            rotates=keys.boolean("rope.scaling.finetuned", True),
            rope_style=self.gguf_rope_style,
            experts=True,
        )
        if any(count not in (0, common["num_kv_heads"]) for count in kv_heads):
            keys.fail(KV_HEADS, "layers that differ in their number of heads are not supported")
        experts: dict[str, Any] = {}
        if keys.integer("expert_count", 0, low=0):
            shared = keys.integer("expert_shared_feed_forward_length", 0, low=0, high=MAX_INTERMEDIATE)
            experts = expert_config.from_gguf(keys) | {"shared_width": shared}
        return GraniteHybridConfig(
            **common | {"architecture": "granite_hybrid"},
            **experts,
            **multipliers_from_gguf(keys),
            **mamba.from_gguf(keys, file),
            attention_layers=tuple(count > 0 for count in kv_heads),
        )

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, GraniteHybridConfig)
        kv_heads = [config.num_kv_heads if attends else 0 for attends in config.attention_layers]
        own = {KV_HEADS: kv_heads, "rope.scaling.finetuned": config.rope_dim > 0}
        return super().gguf_keys(config) | mamba.gguf_keys(config) | own

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        assert isinstance(config, GraniteHybridConfig)
        found = [mamba.by_gguf(each, config) for each in super().canonical_weights(name, weight, config)]
        if config.num_experts:
            return found
        return [replace(each, name=each.name.replace("_shexp", "")) for each in found]

    def layer(self, config: ModelConfig, index: int) -> Layer:
        assert isinstance(config, GraniteHybridConfig)
        layer = super().layer(config, index)
        return layer if config.attention_layers[index] else replace(layer, mixer=mamba.mixer(config))

    def rotary(self, config: ModelConfig, index: int) -> Rotary | None:
        return super().rotary(config, index) if config.rope_dim else None

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, GraniteHybridConfig)
        if not config.num_experts:
            return Glu(config.intermediate_size, config.activation)
        return super().feed_forward(config, index)


def _experts(fields: Fields) -> bool:
    return fields.integer("num_local_experts", 8, low=0) > 0


def _dense(fields: Fields) -> GraniteConfig:
    common = hf_keys.common(fields, "granite")
    if fields.optional_string("position_embedding_type") != "rope":
        fields.fail("position_embedding_type", "only rope is supported in models of attention alone")
    common["intermediate_size"] = fields.integer(SHARED_WIDTH, 1024, high=MAX_INTERMEDIATE)
    return GraniteConfig(**common, **multipliers_from_hf(fields))


def _with_head_dim(fields: Fields, hidden: int, heads: int) -> Fields:
    """The fields with a head dimension, which a file may omit or call auto: heads then divide the inner width
    evenly."""
    if fields.get("mamba_d_head") not in (None, "auto"):
        return fields
    inner = fields.integer("mamba_expand", 2, high=64) * hidden
    if inner % heads:
        fields.fail("mamba_n_heads", f"{inner} channels cannot be shared among {heads} heads evenly")
    return hybrid.with_values(fields, {"mamba_d_head": inner // heads})


FAMILY = GraniteHybrid()

"""LFM2: most layers mix a few tokens by a short convolution between two gates; the others are attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.models import gguf_keys, hf_keys, hybrid
from unspool.models.family import IN_LAYER, WHOLE, Family
from unspool.models.layers import Architecture, Attention, Layer, RmsNorm
from unspool.models.limits import MAX_INTERMEDIATE
from unspool.models.recurrent import ShortConv
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight

THETA = 1_000_000.0
MAX_TAPS = 64
LAST_NORM = "token_embd_norm"  # GGUF's name for the last norm; embeddings are not normed
KV_HEADS = "attention.head_count_kv"


@record(frozen=True)
class Lfm2Config(ModelConfig):
    taps: int = 3  # of the convolutions
    attention_layers: tuple[bool, ...] = ()  # all other layers are convolutions


LFM2_350M = Lfm2Config(
    architecture="lfm2",
    num_layers=16,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=4608,
    vocab_size=65_536,
    context_length=128_000,
    norm_eps=1e-5,
    rope_theta=THETA,
    rope_dim=64,
    tied_embeddings=True,
    attention_layers=tuple(layer in (2, 5, 8, 10, 12, 14) for layer in range(16)),
)


class Lfm2(Family):
    shapes = {
        "lfm2-350m": LFM2_350M,
        "tiny-lfm2": replace(
            LFM2_350M,
            num_layers=3,
            hidden_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rope_dim=16,
            intermediate_size=96,
            vocab_size=288,
            context_length=256,
            attention_layers=(False, True, False),
        ),
    }
    whole_names = WHOLE | {"model.embedding_norm.weight": f"{LAST_NORM}.weight"}
    layer_names = IN_LAYER | {
        "operator_norm.weight": "attn_norm.weight",
        "ffn_norm.weight": "ffn_norm.weight",
        "self_attn.out_proj.weight": "attn_output.weight",
        "self_attn.q_layernorm.weight": "attn_q_norm.weight",
        "self_attn.k_layernorm.weight": "attn_k_norm.weight",
        "conv.conv.weight": "shortconv.conv.weight",
        "conv.in_proj.weight": "shortconv.in_proj.weight",
        "conv.out_proj.weight": "shortconv.out_proj.weight",
        "feed_forward.w1.weight": "ffn_gate.weight",
        "feed_forward.w3.weight": "ffn_up.weight",
        "feed_forward.w2.weight": "ffn_down.weight",
    }

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        kv_heads = hybrid.by_layer(keys, KV_HEADS, keys.integer("block_count"))
        common = gguf_keys.common(hybrid.with_values(keys, {KV_HEADS: max(kv_heads)}), file, theta=THETA)
        if any(count not in (0, common["num_kv_heads"]) for count in kv_heads):
            keys.fail(KV_HEADS, "layers that differ in their number of heads are not supported")
        if common["sliding_window"] is not None:
            keys.fail("attention.sliding_window", "sliding layers are not supported")
        return Lfm2Config(
            **common,
            taps=keys.integer("shortconv.l_cache", low=2, high=MAX_TAPS),
            attention_layers=tuple(count > 0 for count in kv_heads),
        )

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        # The name of the field in transformers, and the one that models were published with.
        keys = {"rms_norm_eps": "norm_eps"}
        if fields.get("intermediate_size") is None:
            keys["intermediate_size"] = "block_ff_dim"
        common = hf_keys.common(fields, name, keys=keys, theta=THETA, tied_embeddings=True)
        common["intermediate_size"] = _feed_forward_size(fields, common["intermediate_size"])
        common["tied_embeddings"] = fields.boolean("tie_embedding", common["tied_embeddings"])
        if fields.boolean("conv_bias", False):
            fields.fail("conv_bias", "biases of convolutions are not supported")
        kinds = hybrid.kinds_of(fields, "layer_types", common["num_layers"], ("conv", "full_attention"))
        return Lfm2Config(
            **common,
            taps=fields.integer("conv_L_cache", 3, low=2, high=MAX_TAPS),
            attention_layers=tuple(kind == "full_attention" for kind in kinds),
        )

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, Lfm2Config)
        kv_heads = [config.num_kv_heads if attends else 0 for attends in config.attention_layers]
        return super().gguf_keys(config) | {KV_HEADS: kv_heads, "shortconv.l_cache": config.taps}

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        return [hybrid.squeezed(each) for each in super().canonical_weights(name, weight, config)]

    def architecture(self, config: ModelConfig) -> Architecture:
        return replace(super().architecture(config), norm_name=LAST_NORM)

    def layer(self, config: ModelConfig, index: int) -> Layer:
        assert isinstance(config, Lfm2Config)
        layer = super().layer(config, index)
        if config.attention_layers[index]:
            return layer
        return replace(layer, mixer=ShortConv(config.hidden_size, config.taps))

    def attention(self, config: ModelConfig, index: int) -> Attention:
        return replace(super().attention(config, index), qk_norm=RmsNorm(config.norm_eps))


def _feed_forward_size(fields: Fields, size: int) -> int:
    """The feed-forward's width: the config's number times two thirds and a factor, rounded up to a multiple."""
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    factor = fields.optional_number("block_ffn_dim_multiplier", low=0, high=1e3)
    if factor is not None:
        multiple = fields.integer("block_multiple_of", 256, high=MAX_INTERMEDIATE)
        size = -(-int(factor * size) // multiple) * multiple
    if not 1 <= size <= MAX_INTERMEDIATE:
        fields.fail("intermediate_size", f"it becomes {size}, which is outside 1 to {MAX_INTERMEDIATE}")
    return size


FAMILY = Lfm2()

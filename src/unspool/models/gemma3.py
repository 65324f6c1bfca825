"""Gemma 3: norms before and after each block, q and k normed, five sliding layers for each global one.

Sliding layers have their own rotation base. Embeddings are scaled. Hugging Face stores a norm's weight w and
applies 1 + w; GGUF stores 1 + w.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.lazy import np
from unspool.models import gguf_keys, hf_keys
from unspool.models.family import IN_LAYER, Family
from unspool.models.layers import Architecture, Attention, Layer, RmsNorm
from unspool.models.limits import MAX_CONTEXT, MAX_LAYERS, MAX_THETA, every_nth_is_global
from unspool.models.qwen2 import TINY_QWEN2
from unspool.models.rotary import Rotary
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight, encode_weight

PATTERN = 6  # five sliding layers, then a global one; older files do not contain it
THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
LAYERS_27B = 62  # the one size whose attention scale is not 1 / sqrt(head_dim)
HEAD_DIM = 256


@record(frozen=True)
class Gemma3Config(ModelConfig):
    rope_theta_local: float = LOCAL_THETA  # of the sliding layers
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    logit_softcap: float | None = None


GEMMA3_270M = Gemma3Config(
    architecture="gemma3",
    num_layers=18,
    hidden_size=640,
    num_heads=4,
    num_kv_heads=1,
    head_dim=HEAD_DIM,
    intermediate_size=2048,
    vocab_size=262_144,
    context_length=32_768,
    norm_eps=1e-6,
    rope_theta=THETA,
    rope_style="half",
    rope_dim=HEAD_DIM,
    tied_embeddings=True,
    activation="gelu_tanh",
    sliding_window=512,
    sliding_layers=every_nth_is_global(PATTERN, 18),
)


def add_one_to_norms(weights: list[Weight]) -> list[Weight]:
    """Convert Hugging Face's norm weights to GGUF's convention."""
    return [
        encode_weight(each.name, each.dequantize() + np.float32(1)) if each.name.endswith("norm.weight") else each
        for each in weights
    ]


def check_scale(config: Gemma3Config, width: int) -> None:
    """Refuse an attention scale other than 1 / sqrt(width), because GGUF files cannot store one."""
    if config.attention_scale is not None and not math.isclose(config.attention_scale, 1 / math.sqrt(width)):
        name, scale = config.architecture, config.attention_scale
        raise ModelError(f"GGUF files of {name} cannot store an attention scale of {scale:g}")


class Gemma3(Family):
    gguf_activation = "gelu_tanh"
    shapes = {
        "gemma3-270m": GEMMA3_270M,
        "tiny-gemma3": replace(
            GEMMA3_270M,
            num_layers=4,
            hidden_size=TINY_QWEN2.hidden_size,
            head_dim=TINY_QWEN2.head_dim,
            rope_dim=TINY_QWEN2.rope_dim,
            intermediate_size=TINY_QWEN2.intermediate_size,
            vocab_size=TINY_QWEN2.vocab_size,
            context_length=TINY_QWEN2.context_length,
            sliding_window=24,
            sliding_layers=every_nth_is_global(3, 4),
        ),
    }
    layer_names = IN_LAYER | {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    }

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        common = gguf_keys.common(keys, file, theta=THETA)
        if common["sliding_window"] is None:
            keys.fail("attention.sliding_window", "it is missing")
        width = common["head_dim"]
        if common["num_layers"] == LAYERS_27B:
            width = common["hidden_size"] // common["num_heads"]
        common["sliding_layers"] = gguf_keys.sliding_layers(keys, common["num_layers"], PATTERN)
        return Gemma3Config(
            **common | {"activation": "gelu_tanh"},
            rope_theta_local=keys.number("rope.freq_base_swa", LOCAL_THETA, low=1, high=MAX_THETA),
            attention_scale=None if width == common["head_dim"] else 1 / math.sqrt(width),
            attention_softcap=keys.optional_number("attn_logit_softcapping", low=0, high=1e6),
            logit_softcap=keys.optional_number("final_logit_softcapping", low=0, high=1e6),
        )

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, Gemma3Config)
        width = config.hidden_size // config.num_heads if config.num_layers == LAYERS_27B else config.head_dim
        check_scale(config, width)
        return super().gguf_keys(config) | {"rope.freq_base_swa": config.rope_theta_local}

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        if fields.boolean("use_bidirectional_attention", False):
            fields.fail("use_bidirectional_attention", "attention that looks ahead is not supported")
        common = hf_keys.common(
            fields, name, theta=THETA, head_dim=HEAD_DIM, tied_embeddings=True, activation="gelu_pytorch_tanh"
        )
        local, sliding = hf_keys.local_rope(fields, common["rope_dim"])
        if sliding is not None:
            fields.fail("rope_parameters.sliding_attention.rope_type", "scaling of sliding layers is not supported")
        scalar = fields.number("query_pre_attn_scalar", 256.0, low=0, high=1e6)
        old = fields.get("_sliding_window_pattern") is None
        key = "sliding_window_pattern" if old else "_sliding_window_pattern"
        pattern = fields.integer(key, PATTERN, high=MAX_LAYERS)
        default = every_nth_is_global(pattern, common["num_layers"])
        return Gemma3Config(
            **common,
            sliding_window=fields.integer("sliding_window", 4096, high=MAX_CONTEXT),
            sliding_layers=hf_keys.sliding_layers(fields, common["num_layers"]) or default,
            rope_theta_local=local or LOCAL_THETA,
            attention_scale=None if scalar == common["head_dim"] else 1 / math.sqrt(scalar),
            attention_softcap=fields.optional_number("attn_logit_softcapping", low=0, high=1e6),
            logit_softcap=fields.optional_number("final_logit_softcapping", low=0, high=1e6),
        )

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        return add_one_to_norms(super().canonical_weights(name, weight, config))

    def architecture(self, config: ModelConfig) -> Architecture:
        assert isinstance(config, Gemma3Config)
        return replace(
            super().architecture(config),
            embedding_scale=math.sqrt(config.hidden_size),
            logit_softcap=config.logit_softcap,
        )

    def layer(self, config: ModelConfig, index: int) -> Layer:
        norm = RmsNorm(config.norm_eps)
        return replace(super().layer(config, index), post_norm=norm, ffn_post_norm=norm)

    def attention(self, config: ModelConfig, index: int) -> Attention:
        assert isinstance(config, Gemma3Config)
        return replace(
            super().attention(config, index),
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            qk_norm=RmsNorm(config.norm_eps),
        )

    def rotary(self, config: ModelConfig, index: int) -> Rotary:
        assert isinstance(config, Gemma3Config)
        rotary = super().rotary(config, index)
        assert rotary is not None
        if config.window(index) is None:
            return rotary
        return replace(rotary, theta=config.rope_theta_local, scaling=None)


FAMILY = Gemma3()

"""Phi 3 and 4: Llama with one tensor for q, k and v, one for gate and up projection, and longrope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig, RopeScaling
from unspool.models import gguf_keys, hf_keys
from unspool.models.family import IN_LAYER, Family
from unspool.models.layers import Attention, FeedForward, Glu
from unspool.models.qwen2 import TINY_QWEN2
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile


class Phi3(Family):
    shapes = {
        "tiny-phi3": replace(
            TINY_QWEN2,
            architecture="phi3",
            qkv_bias=False,
            rope_dim=12,
            rope_scaling=RopeScaling(
                "longrope",
                4.0,
                original_context=128,
                attention_factor=1.125,
                short_factors=(1.0, 1.0, 1.0, 1.25, 1.5, 1.75),
                long_factors=(1.0, 1.5, 2.0, 3.0, 3.5, 4.0),
            ),
        )
    }
    layer_names = IN_LAYER | {
        "self_attn.qkv_proj.weight": "attn_qkv.weight",
        "mlp.gate_up_proj.weight": "ffn_up.weight",
    }

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        config = super().from_hf(fields, name)
        return replace(config, **hf_keys.windows(fields, config.num_layers))

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        return ModelConfig(**gguf_keys.common(keys, file))

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        """Readers of Phi's files need the window and the original context in every file."""
        scaling = config.rope_scaling
        return super().gguf_keys(config) | {
            "attention.sliding_window": config.sliding_window or 0,
            "rope.scaling.original_context_length": scaling.original_context if scaling else config.context_length,
        }

    def attention(self, config: ModelConfig, index: int) -> Attention:
        return replace(super().attention(config, index), fused=True)

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        return Glu(config.intermediate_size, config.activation, fused=True)


FAMILY = Phi3()

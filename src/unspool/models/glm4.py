"""GLM 4: norms before and after each block, biases of q, k and v, half of each head's channels rotated in pairs."""

from __future__ import annotations

from dataclasses import replace

from unspool.config import ModelConfig
from unspool.models import gguf_keys, hf_keys
from unspool.models.family import IN_LAYER, Family
from unspool.models.layers import FeedForward, Glu, Layer, RmsNorm
from unspool.models.llama import TINY
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile

ROTATED = 0.5  # of each head's channels


class Glm4(Family):
    gguf_rope_style = "interleaved"
    shapes = {"tiny-glm4": replace(TINY, architecture="glm4", rope_dim=8, qkv_bias=True)}
    layer_names = IN_LAYER | {
        "post_self_attn_layernorm.weight": "post_attention_norm.weight",
        "post_mlp_layernorm.weight": "post_ffw_norm.weight",
        "mlp.gate_up_proj.weight": "ffn_up.weight",
    }

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        common = hf_keys.common(fields, name, rotated=ROTATED)
        own = {"rope_style": "interleaved", "qkv_bias": fields.boolean("attention_bias", True), "output_bias": False}
        return ModelConfig(**common | own)

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        return ModelConfig(**gguf_keys.common(keys, file, rope_style=self.gguf_rope_style))

    def layer(self, config: ModelConfig, index: int) -> Layer:
        norm = RmsNorm(config.norm_eps)
        return replace(super().layer(config, index), post_norm=norm, ffn_post_norm=norm)

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        return Glu(config.intermediate_size, config.activation, fused=True)


FAMILY = Glm4()

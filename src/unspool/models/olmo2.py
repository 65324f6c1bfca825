"""OLMo 2: norms after each block instead of before, and over whole rows of q and k."""

from __future__ import annotations

from dataclasses import replace

from unspool.config import ModelConfig
from unspool.models.family import IN_LAYER, Family
from unspool.models.layers import Attention, Layer, RmsNorm
from unspool.models.qwen2 import TINY_QWEN2


class Olmo2(Family):
    shapes = {"tiny-olmo2": replace(TINY_QWEN2, architecture="olmo2", qkv_bias=False)}
    layer_names = IN_LAYER | {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    }

    def layer(self, config: ModelConfig, index: int) -> Layer:
        norm = RmsNorm(config.norm_eps)
        return replace(super().layer(config, index), norm=None, ffn_norm=None, post_norm=norm, ffn_post_norm=norm)

    def attention(self, config: ModelConfig, index: int) -> Attention:
        return replace(super().attention(config, index), qk_norm=RmsNorm(config.norm_eps), norm_over="row")


FAMILY = Olmo2()

"""Qwen 3: Llama with norms on each head of q and k."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.models.family import Family
from unspool.models.layers import Attention, RmsNorm
from unspool.models.qwen2 import QWEN2_5_0_5B, TINY_QWEN2, qwen_windows, refuse_windows
from unspool.weights.fields import Fields


class Qwen3(Family):
    shapes = {
        "qwen3-0.6b": replace(
            QWEN2_5_0_5B,
            architecture="qwen3",
            num_layers=28,
            hidden_size=1024,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            rope_dim=128,
            intermediate_size=3072,
            context_length=40_960,
            qkv_bias=False,
        ),
        # heads that are wider than the model's width divided by their number, as in Qwen3
        "tiny-qwen3": replace(TINY_QWEN2, architecture="qwen3", head_dim=32, rope_dim=32, qkv_bias=False),
    }

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        config = super().from_hf(fields, name)
        return replace(config, **qwen_windows(fields, config.num_layers))

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        refuse_windows(config)
        return super().gguf_keys(config)

    def attention(self, config: ModelConfig, index: int) -> Attention:
        return replace(super().attention(config, index), qk_norm=RmsNorm(config.norm_eps))


FAMILY = Qwen3()

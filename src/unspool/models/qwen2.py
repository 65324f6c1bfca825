"""Qwen 2 and 2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from unspool.config import ModelConfig
from unspool.models.family import Family
from unspool.models.llama import TINY
from unspool.weights.fields import Fields

QWEN2_5_0_5B = ModelConfig(
    architecture="qwen2",
    num_layers=24,
    hidden_size=896,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=4864,
    vocab_size=151_936,
    context_length=32_768,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    rope_style="half",
    rope_dim=64,
    tied_embeddings=True,
    qkv_bias=True,
)
TINY_QWEN2 = replace(TINY, architecture="qwen2", rope_style="half", norm_eps=1e-6, qkv_bias=True)


class Qwen2(Family):
    shapes = {"qwen2.5-0.5b": QWEN2_5_0_5B, "tiny-qwen2": TINY_QWEN2}

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        refuse_sliding(fields)
        return replace(super().from_hf(fields, name), qkv_bias=True)


def refuse_sliding(fields: Fields) -> None:
    """Qwen names a window and seldom uses it; where it does, only the layers above max_window_layers slide."""
    if fields.boolean("use_sliding_window", False):
        fields.fail("use_sliding_window", "Qwen's sliding layers are not supported")


FAMILY = Qwen2()

"""Qwen 2 and 2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.models import hf_keys
from unspool.models.family import Family
from unspool.models.limits import MAX_LAYERS
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
        config = super().from_hf(fields, name)
        return replace(config, **qwen_windows(fields, config.num_layers), qkv_bias=True)

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        refuse_windows(config)
        return super().gguf_keys(config)


def qwen_windows(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Qwen's configs have a window but rarely enable it; if they do, only layers from max_window_layers on slide."""
    first = fields.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
    return used_windows(fields, num_layers, tuple(layer >= first for layer in range(num_layers)))


def used_windows(fields: Fields, num_layers: int, sliding: tuple[bool, ...] | None) -> dict[str, Any]:
    """ModelConfig's two fields of sliding windows; `sliding` lists the sliding layers for files that do not."""
    if not fields.boolean("use_sliding_window", False):
        return {"sliding_window": None, "sliding_layers": None}
    return hf_keys.windows(fields, num_layers, sliding)


def refuse_windows(config: ModelConfig) -> None:
    """Refuse a window, for families whose GGUF files have no key for it."""
    if config.sliding_window is not None:
        raise ModelError(f"GGUF files of {config.architecture} cannot store a sliding window")


FAMILY = Qwen2()

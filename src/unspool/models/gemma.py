"""Gemma: Llama with scaled embeddings, wide heads, and norm weights that are stored minus 1."""

from __future__ import annotations

import math
from dataclasses import replace

from unspool.config import ModelConfig
from unspool.models import gguf_keys, hf_keys
from unspool.models.family import Family
from unspool.models.gemma3 import HEAD_DIM, add_one_to_norms
from unspool.models.layers import Architecture
from unspool.models.qwen2 import TINY_QWEN2
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight


class Gemma(Family):
    gguf_activation = "gelu_tanh"
    shapes = {
        "tiny-gemma": replace(
            TINY_QWEN2, architecture="gemma", qkv_bias=False, head_dim=32, rope_dim=32, num_kv_heads=1,
            activation="gelu_tanh", tied_embeddings=True,
        )
    }  # fmt: skip

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        return ModelConfig(**gguf_keys.common(keys, file) | {"activation": "gelu_tanh"})

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        common = hf_keys.common(fields, name, head_dim=HEAD_DIM, tied_embeddings=True)
        # Its first files name gelu but mean the tanh approximation.
        return ModelConfig(**common | {"activation": "gelu_tanh"})

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        return add_one_to_norms(super().canonical_weights(name, weight, config))

    def architecture(self, config: ModelConfig) -> Architecture:
        return replace(super().architecture(config), embedding_scale=math.sqrt(config.hidden_size))


FAMILY = Gemma()

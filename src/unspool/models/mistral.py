"""Mistral: Llama with a sliding window, in its first version and in some layers of Ministral. GGUF calls it llama."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.models import hf_keys
from unspool.models.family import Family
from unspool.models.llama import LLAMA_8B, TINY
from unspool.weights.fields import Fields


class Mistral(Family):
    gguf_rope_style = "interleaved"
    shapes = {
        "mistral-7b": replace(
            LLAMA_8B,
            architecture="mistral",
            vocab_size=32_000,
            context_length=32_768,
            rope_theta=10_000.0,
            rope_scaling=None,
            sliding_window=4096,
        ),
        "tiny-mistral": replace(
            TINY, architecture="mistral", sliding_window=24, tied_embeddings=False
        ),
    }

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        config = super().from_hf(fields, name)
        return replace(config, **hf_keys.windows(fields, config.num_layers))

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        if config.sliding_layers is not None:
            raise ModelError("GGUF files of mistral cannot store a sliding window of some layers only")
        return super().gguf_keys(config)


FAMILY = Mistral()

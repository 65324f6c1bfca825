"""Mistral: Llama with a sliding window in its first version. Its GGUF files say that they are Llama's."""

from __future__ import annotations

from dataclasses import replace

from unspool.config import ModelConfig
from unspool.models import hf_keys
from unspool.models.family import Family
from unspool.models.llama import LLAMA_8B, TINY
from unspool.weights.fields import Fields


class Mistral(Family):
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
            TINY, architecture="mistral", rope_style="half", sliding_window=24, tied_embeddings=False
        ),
    }

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        return replace(super().from_hf(fields, name), sliding_window=hf_keys.window(fields))


FAMILY = Mistral()

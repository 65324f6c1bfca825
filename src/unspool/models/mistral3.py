"""Mistral 3 and Ministral 3: Mistral with yarn, and queries that are scaled by their position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig, RopeScaling
from unspool.models import gguf_keys, hf_keys
from unspool.models.family import Family
from unspool.models.layers import Attention
from unspool.models.llama import TINY
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile


@record(frozen=True)
class Mistral3Config(ModelConfig):
    growth: float = 0.0  # queries are multiplied by 1 + growth · log(1 + ⌊position / original context⌋)


class Mistral3(Family):
    gguf_rope_style = "interleaved"
    shapes = {
        "tiny-mistral3": Mistral3Config(
            **vars(
                replace(
                    TINY,
                    architecture="mistral3",
                    tied_embeddings=False,
                    rope_scaling=RopeScaling("yarn", 8.0, original_context=64),
                )
            ),
            growth=0.125,
        )
    }

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        rope, layers = hf_keys.rope_fields(fields), fields.integer("num_hidden_layers")
        beta = None if rope is None else rope.optional_number("llama_4_scaling_beta", low=0, high=100)
        return Mistral3Config(
            **hf_keys.common(fields, name, theta=1_000_000.0) | hf_keys.windows(fields, layers), growth=beta or 0.0
        )

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        growth = keys.optional_number("attention.temperature_scale", low=-1e-9, high=100) or 0.0
        return Mistral3Config(**gguf_keys.common(keys, file, rope_style=self.gguf_rope_style), growth=growth)

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, Mistral3Config)
        return super().gguf_keys(config) | {"attention.temperature_scale": config.growth}

    def attention(self, config: ModelConfig, index: int) -> Attention:
        assert isinstance(config, Mistral3Config)
        period = config.rope_scaling.original_context if config.rope_scaling else config.context_length
        return replace(super().attention(config, index), growth=config.growth, period=period or config.context_length)


FAMILY = Mistral3()

"""Granite 3: Llama with four multipliers: for embeddings, block results, attention scores, and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.models import gguf_keys, hf_keys
from unspool.models.family import IN_LAYER, Family
from unspool.models.layers import Architecture, Attention, Layer
from unspool.models.llama import TINY
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight

# Our names, Hugging Face's and GGUF's.
MULTIPLIERS = {
    "embedding_multiplier": ("embedding_multiplier", "embedding_scale"),
    "residual_multiplier": ("residual_multiplier", "residual_scale"),
    "attention_multiplier": ("attention_multiplier", "attention.scale"),
    "logit_divisor": ("logits_scaling", "logit_scale"),
}


# Granite 4 stores gates and up projections of its feed-forward as one tensor, in addition to experts if it has any.
SHARED_IN, SHARED_OUT, SHARED_WIDTH = (
    "shared_mlp.input_linear.weight",
    "shared_mlp.output_linear.weight",
    "shared_intermediate_size",
)


def halves(weight: Weight, first: str, second: str) -> list[Weight]:
    """Split a matrix of two stacked projections."""
    if len(weight.shape) != 2 or weight.shape[0] % 2:
        raise ModelError(f"tensor {weight.name} has shape {list(weight.shape)}; gates and up projections were expected")
    (rows, columns), size = weight.shape, weight.nbytes // 2
    parts = weight.raw[:size], weight.raw[size:]
    return [
        Weight(name, weight.format, (rows // 2, columns), part)
        for name, part in zip((first, second), parts, strict=True)
    ]


@record(frozen=True)
class GraniteConfig(ModelConfig):
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logit_divisor: float = 1.0


def multipliers_from_hf(fields: Fields) -> dict[str, Any]:
    return {ours: fields.number(theirs, 1.0, low=0, high=1e6) for ours, (theirs, _) in MULTIPLIERS.items()}


def multipliers_from_gguf(keys: Fields) -> dict[str, Any]:
    return {ours: keys.number(theirs, 1.0, low=0, high=1e6) for ours, (_, theirs) in MULTIPLIERS.items()}


class Granite(Family):
    gguf_rope_style = "interleaved"
    shapes: dict[str, ModelConfig] = {
        "tiny-granite": GraniteConfig(
            **vars(replace(TINY, architecture="granite")),
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.0625,
            logit_divisor=8.0,
        )
    }

    layer_names = IN_LAYER | {SHARED_IN: "ffn_gate_up.weight", SHARED_OUT: "ffn_down.weight"}

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        return GraniteConfig(**hf_keys.common(fields, name), **multipliers_from_hf(fields))

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        common = gguf_keys.common(keys, file, rope_style=self.gguf_rope_style)
        return GraniteConfig(**common, **multipliers_from_gguf(keys))

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().gguf_keys(config) | {key: getattr(config, ours) for ours, (_, key) in MULTIPLIERS.items()}

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        found = super().canonical_weights(name, weight, config)
        if not name.endswith(SHARED_IN):
            return found
        names = (found[0].name.replace("gate_up", part) for part in ("gate", "up"))
        return halves(found[0], *names)

    def architecture(self, config: ModelConfig) -> Architecture:
        assert isinstance(config, GraniteConfig)
        return replace(
            super().architecture(config),
            embedding_scale=config.embedding_multiplier,
            logit_scale=1 / config.logit_divisor,
        )

    def layer(self, config: ModelConfig, index: int) -> Layer:
        assert isinstance(config, GraniteConfig)
        return replace(super().layer(config, index), residual_scale=config.residual_multiplier)

    def attention(self, config: ModelConfig, index: int) -> Attention:
        assert isinstance(config, GraniteConfig)
        return replace(super().attention(config, index), scale=config.attention_multiplier)


FAMILY = Granite()

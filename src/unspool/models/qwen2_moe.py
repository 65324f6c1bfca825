"""Qwen 1.5 and 2 with experts, and a shared expert that every row uses, scaled by a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.models.expert_config import ExpertConfig
from unspool.models.family import Family
from unspool.models.layers import Attention, FeedForward
from unspool.models.limits import MAX_INTERMEDIATE, MAX_LAYERS
from unspool.models.moe import Moe
from unspool.models.qwen2 import used_windows
from unspool.models.qwen3_moe import TINY_QWEN3_MOE, Qwen3Moe
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight

SHARED_GATE = "ffn_gate_inp_shexp.weight"
SHARED_EXPERT = {
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": SHARED_GATE,
}


def with_gate_as_vector(weights: list[Weight]) -> list[Weight]:
    """GGUF stores the shared expert's gate, a matrix of one row, as a vector."""
    return [
        replace(each, shape=each.shape[1:]) if each.name.endswith(SHARED_GATE) and len(each.shape) == 2 else each
        for each in weights
    ]


class Qwen2Moe(Qwen3Moe):
    gguf_normalized = False
    shapes = {
        "tiny-qwen2-moe": replace(
            TINY_QWEN3_MOE, architecture="qwen2_moe", head_dim=16, rope_dim=16, normalized=False, shared_width=96
        )
    }
    layer_names = Qwen3Moe.layer_names | SHARED_EXPERT

    def from_hf(self, fields: Fields, name: str) -> ExpertConfig:
        shared = fields.integer("shared_expert_intermediate_size", high=MAX_INTERMEDIATE)
        return replace(super().from_hf(fields, name), shared_width=shared)

    def windows(self, fields: Fields, num_layers: int) -> dict[str, Any]:
        end = fields.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
        return used_windows(fields, num_layers, tuple(i % 2 == 0 and i < end for i in range(num_layers)))

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ExpertConfig:
        shared = keys.integer("expert_shared_feed_forward_length", high=MAX_INTERMEDIATE)
        config = super().from_gguf(keys, file)
        return replace(config, architecture="qwen2_moe", shared_width=shared)

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, ExpertConfig)
        return super().gguf_keys(config) | {"expert_shared_feed_forward_length": config.shared_width}

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        return with_gate_as_vector(super().canonical_weights(name, weight, config))

    def attention(self, config: ModelConfig, index: int) -> Attention:
        return replace(Family.attention(self, config, index), qkv_bias=True)

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, ExpertConfig)
        layer = super().feed_forward(config, index)
        if not isinstance(layer, Moe):
            return layer
        return replace(layer, shared_width=config.shared_width, shared_gate=True)


FAMILY = Qwen2Moe()

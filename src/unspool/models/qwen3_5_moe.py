"""Qwen 3.5 to 3.8 with experts, and a shared expert scaled by a gate, in place of the feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.models import expert_config
from unspool.models.expert_config import ExpertConfig
from unspool.models.layers import FeedForward, Glu
from unspool.models.limits import MAX_INTERMEDIATE
from unspool.models.moe import Moe
from unspool.models.qwen2_moe import SHARED_EXPERT, with_gate_as_vector
from unspool.models.qwen3_5 import TINY_QWEN3_5, Qwen35
from unspool.models.qwen3_moe import EXPERT, STACKS
from unspool.ops.routing import Routing
from unspool.weights.fields import Fields
from unspool.weights.weight import Weight

TINY_QWEN3_5_MOE = replace(
    TINY_QWEN3_5, architecture="qwen3_5_moe", num_experts=8, num_used_experts=3, expert_width=64, shared_width=64
)
QWEN3_5_35B_A3B = replace(
    TINY_QWEN3_5_MOE, num_layers=40, hidden_size=2048, num_heads=16, num_kv_heads=2, head_dim=256, rope_dim=64,
    intermediate_size=512, vocab_size=248_320, context_length=262_144, rope_theta=1e7, tied_embeddings=False,
    delta_heads=32, delta_key_heads=16, delta_key_dim=128, delta_value_dim=128,
    attention_layers=tuple((layer + 1) % 4 == 0 for layer in range(40)),
    num_experts=256, num_used_experts=8, expert_width=512, shared_width=512,
)  # fmt: skip


class Qwen35Moe(Qwen35):
    shapes = {"qwen3.5-35b-a3b": QWEN3_5_35B_A3B, "tiny-qwen3.5-moe": TINY_QWEN3_5_MOE}
    no_dense_width = 1
    layer_names = Qwen35.layer_names | STACKS | SHARED_EXPERT | {"mlp.gate.weight": "ffn_gate_inp.weight"}

    def experts_from_hf(self, fields: Fields, num_layers: int) -> dict[str, Any]:
        shared = fields.integer("shared_expert_intermediate_size", 512, high=MAX_INTERMEDIATE)
        return expert_config.from_hf(fields, num_layers) | {
            "shared_width": shared,
            "normalized": fields.boolean("norm_topk_prob", True),
        }

    def experts_from_gguf(self, keys: Fields) -> dict[str, Any]:
        shared = keys.integer("expert_shared_feed_forward_length", high=MAX_INTERMEDIATE)
        return expert_config.from_gguf(keys) | {"shared_width": shared}

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, ExpertConfig)
        return (
            super().gguf_keys(config)
            | expert_config.gguf_keys(config)
            | {"expert_shared_feed_forward_length": config.shared_width}
        )

    def canonical_layer_name(self, rest: str) -> str | None:
        found = EXPERT.fullmatch(rest)
        return f"ffn_{found[2]}_exps.{found[1]}.weight" if found else super().canonical_layer_name(rest)

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        assert isinstance(config, ExpertConfig)
        found = with_gate_as_vector(super().canonical_weights(name, weight, config))
        if not name.endswith(tuple(STACKS)):
            return found
        return [part for each in found for part in expert_config.split_experts(each, config, may_be_transposed=False)]

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, ExpertConfig)
        if index in config.dense_layers:
            return Glu(config.intermediate_size, config.activation)
        routing = Routing(config.num_experts, config.num_used_experts, normalized=config.normalized)
        return Moe(
            routing, config.expert_width, config.activation, shared_width=config.shared_width, shared_gate=True
        )


FAMILY = Qwen35Moe()

"""LFM2 with experts, chosen by sigmoids with a correction, except in the first layers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.models import expert_config, hybrid
from unspool.models.glm4_moe import SigmoidExpertConfig, sigmoid_routing
from unspool.models.layers import FeedForward, Glu
from unspool.models.lfm2 import LFM2_350M, Lfm2, Lfm2Config
from unspool.models.moe import Moe
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile

EXPERT = re.compile(r"feed_forward\.experts\.(\d+)\.(w1|w2|w3)\.weight")
PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
DENSE = "leading_dense_block_count"


@record(frozen=True)
class Lfm2MoeConfig(Lfm2Config, SigmoidExpertConfig):
    choice_bias: bool = True


LFM2_8B_A1B = Lfm2MoeConfig(
    **vars(
        replace(
            LFM2_350M,
            architecture="lfm2_moe",
            num_layers=24,
            hidden_size=2048,
            num_heads=32,
            intermediate_size=7168,
            attention_layers=tuple(layer in (2, 6, 10, 14, 18, 21) for layer in range(24)),
        )
    ),
    num_experts=32,
    num_used_experts=4,
    expert_width=1792,
    dense_layers=(0, 1),
)


class Lfm2Moe(Lfm2):
    shapes = {
        "lfm2-8b-a1b": LFM2_8B_A1B,
        "tiny-lfm2-moe": replace(
            LFM2_8B_A1B, num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, rope_dim=16,
            intermediate_size=96, vocab_size=288, context_length=256, attention_layers=(False, True, False),
            num_experts=8, num_used_experts=3, expert_width=64, dense_layers=(0,),
        ),
    }  # fmt: skip
    layer_names = Lfm2.layer_names | {
        "feed_forward.gate.weight": "ffn_gate_inp.weight",
        "feed_forward.expert_bias": "exp_probs_b.bias",
    }

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        plain = super().from_hf(hybrid.with_values(fields, {"block_auto_adjust_ff_dim": False}), name)
        dense = fields.integer("num_dense_layers", 2, low=0, high=plain.num_layers)
        return Lfm2MoeConfig(
            **vars(plain)
            | expert_config.from_hf(fields, plain.num_layers)
            | {"dense_layers": tuple(range(dense)), "normalized": fields.boolean("norm_topk_prob", True)},
            routed_scale=fields.number("routed_scaling_factor", 1.0, low=0, high=1e6),
            choice_bias=fields.boolean("use_expert_bias", True),
        )

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        plain = super().from_gguf(hybrid.with_values(keys, {"expert_count": 0}), file)
        dense = keys.integer(DENSE, 0, low=0, high=plain.num_layers)
        own = {"architecture": "lfm2_moe", "dense_layers": tuple(range(dense))}
        return Lfm2MoeConfig(**vars(plain) | expert_config.from_gguf(keys) | own)

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, Lfm2MoeConfig)
        if not config.normalized or not config.choice_bias or config.routed_scale != 1:
            raise ModelError("GGUF files of lfm2moe have experts whose weights add up to 1, and a correction")
        return super().gguf_keys(config) | expert_config.gguf_keys(replace(config, dense_layers=())) | {
            DENSE: len(config.dense_layers),
            "expert_gating_func": 2,  # sigmoid
        }  # fmt: skip

    def canonical_layer_name(self, rest: str) -> str | None:
        found = EXPERT.fullmatch(rest)
        return f"ffn_{PARTS[found[2]]}_exps.{found[1]}.weight" if found else super().canonical_layer_name(rest)

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, Lfm2MoeConfig)
        if index in config.dense_layers:
            return Glu(config.intermediate_size, config.activation)
        return Moe(sigmoid_routing(config), config.expert_width, config.activation, choice_bias=config.choice_bias)


FAMILY = Lfm2Moe()

"""MiniMax M2: Mixtral's experts chosen by sigmoids with a correction, norms over whole rows of q and k."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.models import expert_config, gguf_keys, hf_keys
from unspool.models.expert_config import ExpertConfig
from unspool.models.family import IN_LAYER
from unspool.models.layers import Attention, FeedForward, RmsNorm
from unspool.models.limits import MAX_HEAD_DIM
from unspool.models.mixtral import Mixtral
from unspool.models.moe import Moe
from unspool.models.qwen3_moe import TINY_QWEN3_MOE
from unspool.ops.routing import Routing
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile

THETA = 5_000_000.0


class MiniMaxM2(Mixtral):
    gguf_rope_style = "half"
    shapes = {"tiny-minimax-m2": replace(TINY_QWEN3_MOE, architecture="minimax_m2", rope_dim=16)}
    layer_names = IN_LAYER | {
        "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
        "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    }

    def from_hf(self, fields: Fields, name: str) -> ExpertConfig:
        common = hf_keys.common(fields, name, theta=THETA)
        if fields.get("rotary_dim") is not None and hf_keys.rope_fields(fields) is None:
            common["rope_dim"] = fields.integer("rotary_dim", high=MAX_HEAD_DIM)
        return ExpertConfig(**common, **expert_config.from_hf(fields, common["num_layers"], width="intermediate_size"))

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ExpertConfig:
        common = gguf_keys.common(keys, file, experts=True)
        return ExpertConfig(**common | {"architecture": "minimax_m2"}, **expert_config.from_gguf(keys))

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().gguf_keys(config) | {"expert_gating_func": 2}  # sigmoid

    def attention(self, config: ModelConfig, index: int) -> Attention:
        return replace(super().attention(config, index), qk_norm=RmsNorm(config.norm_eps), norm_over="row")

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, ExpertConfig)
        routing = Routing(config.num_experts, config.num_used_experts, "sigmoid")
        return Moe(routing, config.expert_width, config.activation, choice_bias=True)


FAMILY = MiniMaxM2()

"""GLM 4.5 to 4.7: experts chosen by sigmoids with a correction, except in the first layers; a shared expert.

Files have an additional layer for multi-token prediction (MTP), which can draft; a model runs without it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.models import draft_head, expert_config, gguf_keys, hf_keys
from unspool.models.draft_head import DraftHead
from unspool.models.expert_config import ExpertConfig
from unspool.models.family import IN_LAYER, Family
from unspool.models.layers import Attention, FeedForward, Glu, Layer, RmsNorm
from unspool.models.limits import MAX_EXPERTS, MAX_INTERMEDIATE
from unspool.models.moe import Moe
from unspool.models.qwen3_moe import EXPERT, TINY_QWEN3_MOE
from unspool.ops.routing import Routing
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight

ROTATED = 0.5  # of each head's channels
FFN_NORM = "post_attention_norm"  # GGUF's name for the norm before the feed-forward


@record(frozen=True)
class SigmoidExpertConfig(ExpertConfig):
    """A model whose rows choose experts by sigmoids; a correction is added for the choice only."""

    routed_scale: float = 1.0
    num_groups: int = 1
    num_used_groups: int = 1
    has_qk_norm: bool = False
    extra_layers: int = 0  # further layers in the files, which are not run


def sigmoid_experts_from_hf(fields: Fields, num_layers: int) -> dict[str, Any]:
    experts = fields.integer("n_routed_experts", high=MAX_EXPERTS)
    width = fields.integer("moe_intermediate_size", high=MAX_INTERMEDIATE)
    groups = fields.integer("n_group", 1, high=experts)
    return {
        "num_experts": experts,
        "num_used_experts": fields.integer("num_experts_per_tok", high=experts),
        "expert_width": width,
        "shared_width": width * fields.integer("n_shared_experts", 1, low=0, high=64),
        "dense_layers": tuple(range(fields.integer("first_k_dense_replace", 0, low=0, high=num_layers))),
        "normalized": fields.boolean("norm_topk_prob", True),
        "routed_scale": fields.number("routed_scaling_factor", 1.0, low=0, high=1e6),
        "num_groups": groups,
        "num_used_groups": fields.integer("topk_group", 1, high=groups),
    }


def sigmoid_experts_from_gguf(keys: Fields, file: GGUFFile, num_layers: int) -> dict[str, Any]:
    experts = expert_config.from_gguf(keys)
    shared = keys.integer("expert_shared_count", 0, low=0, high=64)
    width = keys.integer("expert_shared_feed_forward_length", shared * experts["expert_width"], low=0)
    groups = keys.integer("expert_group_count", 1, high=experts["num_experts"])
    return experts | {
        "shared_width": width if f"blk.{num_layers - 1}.ffn_up_shexp.weight" in file.tensors else 0,
        "dense_layers": tuple(range(keys.integer("leading_dense_block_count", 0, low=0, high=num_layers))),
        "normalized": keys.boolean("expert_weights_norm", True),
        "routed_scale": keys.number("expert_weights_scale", 1.0, low=0, high=1e6),
        "num_groups": groups,
        "num_used_groups": keys.integer("expert_group_used_count", 1, high=groups),
    }


def sigmoid_expert_keys(config: SigmoidExpertConfig) -> dict[str, Any]:
    """The keys that `sigmoid_experts_from_gguf` reads back."""
    return expert_config.gguf_keys(replace(config, dense_layers=())) | {
        "expert_shared_count": -(-config.shared_width // config.expert_width),
        "expert_shared_feed_forward_length": config.shared_width,
        "leading_dense_block_count": len(config.dense_layers),
        "expert_weights_norm": config.normalized,
        "expert_weights_scale": config.routed_scale,
        "expert_group_count": config.num_groups,
        "expert_group_used_count": config.num_used_groups,
        "expert_gating_func": 2,  # sigmoid
    }


def sigmoid_routing(config: SigmoidExpertConfig) -> Routing:
    return Routing(
        config.num_experts,
        config.num_used_experts,
        "sigmoid",
        normalized=config.normalized,
        scale=config.routed_scale,
        num_groups=config.num_groups,
        num_used_groups=config.num_used_groups,
    )


class Glm4Moe(Family):
    shapes: dict[str, ModelConfig] = {
        "tiny-glm4-moe": SigmoidExpertConfig(
            **vars(
                replace(
                    TINY_QWEN3_MOE,
                    architecture="glm4_moe",
                    num_layers=3,
                    rope_dim=16,
                    qkv_bias=True,
                    shared_width=64,
                    dense_layers=(0,),
                )
            ),
            routed_scale=1.5,
            has_qk_norm=True,
        )
    }
    layer_names = IN_LAYER | draft_head.NAMES | {
        "post_attention_layernorm.weight": f"{FFN_NORM}.weight",
        "mlp.gate.weight": "ffn_gate_inp.weight",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
        "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
        "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    }

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        common = hf_keys.common(fields, name, rotated=ROTATED) | {"output_bias": False}
        return SigmoidExpertConfig(
            **common,
            **sigmoid_experts_from_hf(fields, common["num_layers"]),
            has_qk_norm=fields.boolean("use_qk_norm", False),
            extra_layers=fields.integer("num_nextn_predict_layers", 0, low=0, high=64),
        )

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        common = gguf_keys.common(keys, file, experts=True)
        extra = keys.integer("nextn_predict_layers", 0, low=0, high=common["num_layers"] - 1)
        layers = common["num_layers"] - extra
        return SigmoidExpertConfig(
            **common | {"architecture": "glm4_moe", "num_layers": layers},
            **sigmoid_experts_from_gguf(keys, file, layers),
            has_qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            extra_layers=extra,
        )

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, SigmoidExpertConfig)
        return super().gguf_keys(config) | sigmoid_expert_keys(config) | extra_layer_keys(config)

    def ignores(self, name: str, config: ModelConfig) -> bool:
        assert isinstance(config, SigmoidExpertConfig)
        return super().ignores(name, config) or beyond_layers(name, "blk.", config.num_layers, config.extra_layers)

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        assert isinstance(config, SigmoidExpertConfig)
        if beyond_layers(name, self.layer_prefix, config.num_layers, config.extra_layers):
            return []
        return super().canonical_weights(name, weight, config)

    def draft_head(self, config: ModelConfig) -> DraftHead | None:
        assert isinstance(config, SigmoidExpertConfig)
        if not config.extra_layers:
            return None
        return DraftHead(self.layer(config, config.num_layers), config.num_layers, RmsNorm(config.norm_eps))

    def draft_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        assert isinstance(config, SigmoidExpertConfig)
        is_of_head = config.extra_layers and name.startswith(f"{self.layer_prefix}{config.num_layers}.")
        return self.canonical_weights(name, weight, replace(config, extra_layers=0)) if is_of_head else []

    def canonical_layer_name(self, rest: str) -> str | None:
        found = EXPERT.fullmatch(rest)
        return f"ffn_{found[2]}_exps.{found[1]}.weight" if found else super().canonical_layer_name(rest)

    def layer(self, config: ModelConfig, index: int) -> Layer:
        return replace(super().layer(config, index), ffn_norm_name=FFN_NORM)

    def attention(self, config: ModelConfig, index: int) -> Attention:
        assert isinstance(config, SigmoidExpertConfig)
        return replace(
            super().attention(config, index), qk_norm=RmsNorm(config.norm_eps) if config.has_qk_norm else None
        )

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, SigmoidExpertConfig)
        if index in config.dense_layers:
            return Glu(config.intermediate_size, config.activation)
        routing, width = sigmoid_routing(config), config.expert_width
        return Moe(routing, width, config.activation, choice_bias=True, shared_width=config.shared_width)


def extra_layer_keys(config: SigmoidExpertConfig) -> dict[str, Any]:
    if not config.extra_layers:
        return {}
    return {"block_count": config.num_layers + config.extra_layers, "nextn_predict_layers": config.extra_layers}


def beyond_layers(name: str, prefix: str, num_layers: int, extra: int) -> bool:
    """Whether a tensor belongs to one of the `extra` layers that files have after the model's own layers."""
    found = re.match(re.escape(prefix) + r"(\d{1,6})\.", name)
    return found is not None and num_layers <= int(found[1]) < num_layers + extra


FAMILY = Glm4Moe()

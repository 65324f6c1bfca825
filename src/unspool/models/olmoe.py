"""OLMoE: experts in place of the feed-forward, and norms over whole rows of q and k."""

from __future__ import annotations

from dataclasses import replace

from unspool.config import ModelConfig
from unspool.models import expert_config, hf_keys
from unspool.models.expert_config import ExpertConfig
from unspool.models.family import Family
from unspool.models.layers import Attention, RmsNorm
from unspool.models.qwen3_moe import TINY_QWEN3_MOE, Qwen3Moe
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile


class Olmoe(Qwen3Moe):
    gguf_normalized = False
    shapes = {
        "olmoe-1b-7b": ExpertConfig(
            architecture="olmoe",
            num_layers=16,
            hidden_size=2048,
            num_heads=16,
            num_kv_heads=16,
            head_dim=128,
            intermediate_size=1024,
            vocab_size=50304,
            context_length=4096,
            norm_eps=1e-5,
            rope_dim=128,
            num_experts=64,
            num_used_experts=8,
            expert_width=1024,
            normalized=False,
        ),
        "tiny-olmoe": replace(TINY_QWEN3_MOE, architecture="olmoe", head_dim=16, rope_dim=16, normalized=False),
    }

    def from_hf(self, fields: Fields, name: str) -> ExpertConfig:
        if fields.get("clip_qkv") is not None:
            fields.fail("clip_qkv", "clipped queries, keys and values are not supported")
        common = hf_keys.common(fields, name)
        experts = expert_config.from_hf(fields, common["num_layers"], width="intermediate_size")
        return ExpertConfig(**common, **experts, normalized=fields.boolean("norm_topk_prob", False))

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ExpertConfig:
        return replace(super().from_gguf(keys, file), architecture="olmoe")

    def attention(self, config: ModelConfig, index: int) -> Attention:
        norm = RmsNorm(config.norm_eps)
        return replace(Family.attention(self, config, index), qk_norm=norm, norm_over="row")


FAMILY = Olmoe()

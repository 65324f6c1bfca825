"""Mixtral: Mistral with experts in place of its feed-forward. GGUF files call it llama, with experts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig, RopeStyle
from unspool.models import expert_config, gguf_keys, hf_keys
from unspool.models.expert_config import ExpertConfig
from unspool.models.family import IN_LAYER, Family
from unspool.models.layers import FeedForward
from unspool.models.llama import LLAMA_8B, TINY
from unspool.models.moe import Moe
from unspool.ops.routing import Routing
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile

EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.w([123])\.weight")
PARTS = {"1": "gate", "2": "down", "3": "up"}


class Mixtral(Family):
    gguf_rope_style: RopeStyle = "interleaved"
    shapes = {
        "mixtral-8x7b": ExpertConfig(
            **vars(replace(
                LLAMA_8B, architecture="mixtral", vocab_size=32_000, context_length=32_768, rope_theta=1e6,
                rope_scaling=None,
            )),
            num_experts=8, num_used_experts=2, expert_width=14_336,
        ),
        "tiny-mixtral": ExpertConfig(
            **vars(replace(TINY, architecture="mixtral")), num_experts=4, num_used_experts=2, expert_width=96
        ),
    }  # fmt: skip
    layer_names = {**IN_LAYER, "block_sparse_moe.gate.weight": "ffn_gate_inp.weight"}

    def from_hf(self, fields: Fields, name: str) -> ExpertConfig:
        common = hf_keys.common(fields, name) | {"sliding_window": hf_keys.window(fields)}
        return ExpertConfig(**common, **expert_config.from_hf(fields, common["num_layers"], width="intermediate_size"))

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ExpertConfig:
        common = gguf_keys.common(keys, file, rope_style=self.gguf_rope_style, experts=True)
        return ExpertConfig(**common | {"architecture": "mixtral"}, **expert_config.from_gguf(keys))

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().gguf_keys(config) | expert_config.gguf_keys(config)

    def canonical_layer_name(self, rest: str) -> str | None:
        found = EXPERT.fullmatch(rest)
        return f"ffn_{PARTS[found[2]]}_exps.{found[1]}.weight" if found else super().canonical_layer_name(rest)

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, ExpertConfig)
        return Moe(Routing(config.num_experts, config.num_used_experts), config.expert_width, config.activation)


FAMILY = Mixtral()

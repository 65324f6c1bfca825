"""Qwen 3 with experts in place of its feed-forward."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.models import expert_config, gguf_keys, hf_keys
from unspool.models.expert_config import ExpertConfig
from unspool.models.family import IN_LAYER
from unspool.models.layers import FeedForward, Glu
from unspool.models.moe import Moe
from unspool.models.qwen2 import TINY_QWEN2, used_windows
from unspool.models.qwen3 import Qwen3
from unspool.ops.routing import Routing
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight

EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
STACKS = {  # all experts of a layer in one tensor, as newer files store them
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
TINY_QWEN3_MOE = ExpertConfig(
    **vars(replace(TINY_QWEN2, architecture="qwen3_moe", head_dim=32, rope_dim=32)),
    num_experts=8,
    num_used_experts=3,
    expert_width=64,
)


QWEN3_30B_A3B = replace(
    TINY_QWEN3_MOE, num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, rope_dim=128,
    intermediate_size=6144, vocab_size=151_936, context_length=40_960, rope_theta=1e6, tied_embeddings=False,
    num_experts=128, num_used_experts=8, expert_width=768,
)  # fmt: skip


class Qwen3Moe(Qwen3):
    gguf_normalized = True  # GGUF files have no key for it
    shapes = {"qwen3-30b-a3b": QWEN3_30B_A3B, "tiny-qwen3-moe": TINY_QWEN3_MOE}
    layer_names = IN_LAYER | STACKS | {"mlp.gate.weight": "ffn_gate_inp.weight"}

    def from_hf(self, fields: Fields, name: str) -> ExpertConfig:
        common = hf_keys.common(fields, name)
        layers = common["num_layers"]
        experts, windows = expert_config.from_hf(fields, layers), self.windows(fields, layers)
        return ExpertConfig(**common, **experts, **windows, normalized=fields.boolean("norm_topk_prob", False))

    def windows(self, fields: Fields, num_layers: int) -> dict[str, Any]:
        """ModelConfig's two fields of sliding windows."""
        return used_windows(fields, num_layers, None)

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ExpertConfig:
        common = gguf_keys.common(keys, file, experts=True) | {"architecture": "qwen3_moe"}
        return ExpertConfig(**common, **expert_config.from_gguf(keys), normalized=self.gguf_normalized)

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, ExpertConfig)
        if config.normalized != self.gguf_normalized:
            not_known = "add up to 1" if config.normalized else "do not add up to 1"
            raise ModelError(f"GGUF files of {config.architecture} cannot store that experts' weights {not_known}")
        return super().gguf_keys(config) | expert_config.gguf_keys(config)

    def canonical_layer_name(self, rest: str) -> str | None:
        found = EXPERT.fullmatch(rest)
        return f"ffn_{found[2]}_exps.{found[1]}.weight" if found else super().canonical_layer_name(rest)

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        assert isinstance(config, ExpertConfig)
        found = super().canonical_weights(name, weight, config)
        if not name.endswith(tuple(STACKS)):
            return found
        return [part for each in found for part in expert_config.split_experts(each, config)]

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, ExpertConfig)
        if index in config.dense_layers:
            return Glu(config.intermediate_size, config.activation)
        routing = Routing(config.num_experts, config.num_used_experts, normalized=config.normalized)
        return Moe(routing, config.expert_width, config.activation)


FAMILY = Qwen3Moe()

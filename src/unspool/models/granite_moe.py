"""Granite 3 with experts in place of its feed-forward, and possibly a shared expert. Hugging Face stores gates and up
projections as one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.models import expert_config, gguf_keys, hf_keys
from unspool.models.expert_config import ExpertConfig
from unspool.models.family import IN_LAYER
from unspool.models.granite import (
    SHARED_IN,
    SHARED_OUT,
    SHARED_WIDTH,
    Granite,
    GraniteConfig,
    multipliers_from_gguf,
    multipliers_from_hf,
)
from unspool.models.layers import FeedForward
from unspool.models.limits import MAX_INTERMEDIATE
from unspool.models.moe import Moe
from unspool.ops.routing import Routing
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight

MOE = "block_sparse_moe."
GGUF_SHARED_WIDTH = "expert_shared_feed_forward_length"


@record(frozen=True)
class GraniteMoeConfig(GraniteConfig, ExpertConfig):
    pass


def _halves(stack: Weight) -> Iterator[Weight]:
    """Each expert's gate and up projection, which are stored one after the other."""
    count, rows, columns = stack.shape
    size = stack.nbytes // (2 * count)
    stem = stack.name.removesuffix("gate_up_exps.weight")
    for half in range(2 * count):
        name = f"{stem}{'up' if half % 2 else 'gate'}_exps.{half // 2}.weight"
        yield Weight(name, stack.format, (rows // 2, columns), stack.raw[half * size : (half + 1) * size])


class GraniteMoe(Granite):
    shapes = {
        "tiny-granite-moe": GraniteMoeConfig(
            **vars(replace(Granite.shapes["tiny-granite"], architecture="granite_moe")),
            num_experts=8,
            num_used_experts=3,
            expert_width=96,
        ),
        "granite-1b-a400m": GraniteMoeConfig(
            architecture="granite_moe",
            num_layers=24,
            hidden_size=1024,
            num_heads=16,
            num_kv_heads=8,
            head_dim=64,
            intermediate_size=512,
            vocab_size=49155,
            context_length=131_072,
            norm_eps=1e-6,
            rope_dim=64,
            rope_theta=1_500_000.0,
            tied_embeddings=True,
            num_experts=32,
            num_used_experts=8,
            expert_width=512,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.015625,
            logit_divisor=6.0,
        ),
    }
    layer_names = IN_LAYER | {
        f"{MOE}router.layer.weight": "ffn_gate_inp.weight",
        f"{MOE}input_linear.weight": "ffn_gate_up_exps.weight",
        f"{MOE}output_linear.weight": "ffn_down_exps.weight",
        SHARED_IN: "ffn_gate_up_shexp.weight",
        SHARED_OUT: "ffn_down_shexp.weight",
    }

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        common = hf_keys.common(fields, name)
        experts = expert_config.from_hf(fields, common["num_layers"], width="intermediate_size")
        if fields.get(SHARED_WIDTH):
            experts["shared_width"] = fields.integer(SHARED_WIDTH, high=MAX_INTERMEDIATE)
        return GraniteMoeConfig(**common, **experts, **multipliers_from_hf(fields))

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        common = gguf_keys.common(keys, file, rope_style=self.gguf_rope_style, experts=True)
        common["architecture"] = "granite_moe"
        experts = expert_config.from_gguf(keys)
        experts["shared_width"] = keys.integer(GGUF_SHARED_WIDTH, 0, low=0, high=MAX_INTERMEDIATE)
        return GraniteMoeConfig(**common, **experts, **multipliers_from_gguf(keys))

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, ExpertConfig)
        if not config.num_experts:
            return super().gguf_keys(config)
        shared = {GGUF_SHARED_WIDTH: config.shared_width} if config.shared_width else {}
        return super().gguf_keys(config) | expert_config.gguf_keys(config) | shared

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        found = super().canonical_weights(name, weight, config)
        if not name.endswith(f"{MOE}input_linear.weight"):
            return found
        if len(weight.shape) != 3 or weight.shape[1] % 2:
            raise ModelError(f"tensor {name!r} has shape {list(weight.shape)}; gates and up projections were expected")
        return list(_halves(found[0]))

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, ExpertConfig)
        routing = Routing(config.num_experts, config.num_used_experts)
        return Moe(routing, config.expert_width, config.activation, shared_width=config.shared_width)


FAMILY = GraniteMoe()

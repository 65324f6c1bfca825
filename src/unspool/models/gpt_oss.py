"""gpt-oss: experts with a clamped gate, attention with sinks, every second layer sliding, biases everywhere.

Hugging Face alternates an expert's gates and up projections, floats as [in, out], MXFP4 as [out, in]; GGUF stores them
as separate tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig, RopeScaling
from unspool.errors import ModelError
from unspool.lazy import np
from unspool.models import expert_config, gguf_keys, hf_keys
from unspool.models.expert_config import ExpertConfig
from unspool.models.family import IN_LAYER, Family
from unspool.models.layers import Attention, FeedForward, Layer
from unspool.models.limits import MAX_CONTEXT, every_nth_is_global
from unspool.models.moe import Moe
from unspool.models.qwen3_moe import TINY_QWEN3_MOE
from unspool.ops.routing import Routing
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight, encode_weight

PATTERN, WINDOW, THETA = 2, 128, 150_000.0
HEAD_DIM = 64
FFN_NORM = "post_attention_norm"  # GGUF's name for the norm before the experts


class GptOss(Family):
    shapes = {
        "tiny-gpt-oss": replace(
            TINY_QWEN3_MOE,
            architecture="gpt_oss",
            num_layers=4,
            tied_embeddings=False,
            sliding_window=24,
            sliding_layers=every_nth_is_global(PATTERN, 4),
            qkv_bias=True,
            output_bias=True,
            rope_scaling=RopeScaling("yarn", 4.0, original_context=128, truncate=False),
        ),
        "gpt-oss-20b": ExpertConfig(
            architecture="gpt_oss",
            num_layers=24,
            hidden_size=2880,
            num_heads=64,
            num_kv_heads=8,
            head_dim=HEAD_DIM,
            intermediate_size=2880,
            vocab_size=201_088,
            context_length=131_072,
            norm_eps=1e-5,
            rope_dim=HEAD_DIM,
            rope_theta=THETA,
            rope_scaling=RopeScaling("yarn", 32.0, original_context=4096, truncate=False),
            qkv_bias=True,
            output_bias=True,
            sliding_window=WINDOW,
            sliding_layers=every_nth_is_global(PATTERN, 24),
            num_experts=32,
            num_used_experts=4,
            expert_width=2880,
        ),
    }
    layer_names = IN_LAYER | {
        "post_attention_layernorm.weight": f"{FFN_NORM}.weight",
        "self_attn.sinks": "attn_sinks.weight",
        "mlp.router.weight": "ffn_gate_inp.weight",
        "mlp.router.bias": "ffn_gate_inp.bias",
        "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "mlp.experts.gate_up_proj_bias": "ffn_gate_up_exps.bias",
        "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    }

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        for key, expected in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
            if fields.number(key, expected, low=0, high=1e6) != expected:
                fields.fail(key, f"only {expected} is supported")
        common = hf_keys.common(fields, name, theta=THETA, head_dim=HEAD_DIM)
        layers = hf_keys.sliding_layers(fields, common["num_layers"])
        return ExpertConfig(
            **common,
            **expert_config.from_hf(fields, common["num_layers"], width="intermediate_size"),
            sliding_window=fields.integer("sliding_window", WINDOW, high=MAX_CONTEXT),
            sliding_layers=layers or every_nth_is_global(PATTERN, common["num_layers"]),
        )

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        common = gguf_keys.common(keys, file, theta=THETA, experts=True)
        scaling = common["rope_scaling"]
        own = {
            "architecture": "gpt_oss",
            "sliding_window": common["sliding_window"] or WINDOW,
            "sliding_layers": gguf_keys.sliding_layers(keys, common["num_layers"], PATTERN),
            "rope_scaling": scaling and replace(scaling, truncate=False),
        }
        return ExpertConfig(**common | own, **expert_config.from_gguf(keys))

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().gguf_keys(config) | expert_config.gguf_keys(config)

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        found = super().canonical_weights(name, weight, config)
        if name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
            return [part for each in found for part in _parted(each)]
        if name.endswith("experts.down_proj") and weight.format != "mxfp4":
            return [encode_weight(each.name, each.dequantize().swapaxes(1, 2), each.format) for each in found]
        return found

    def layer(self, config: ModelConfig, index: int) -> Layer:
        return replace(super().layer(config, index), ffn_norm_name=FFN_NORM)

    def attention(self, config: ModelConfig, index: int) -> Attention:
        return replace(super().attention(config, index), sinks=True)

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, ExpertConfig)
        routing = Routing(config.num_experts, config.num_used_experts)
        return Moe(routing, config.expert_width, "clamped_swiglu", router_bias=True, expert_bias=True)


def _parted(both: Weight) -> Iterator[Weight]:
    """Split gates and up projections, which alternate in the last dimension, or as rows in MXFP4."""
    if both.format == "mxfp4":
        yield from _parted_rows(both)
        return
    values = both.dequantize()
    if values.shape[-1] % 2:
        raise ModelError(f"tensor {both.name} has shape {list(both.shape)}; gates and up projections were expected")
    for index, part in enumerate(("gate", "up")):
        taken = values[..., index::2]
        if values.ndim == 3:
            taken = taken.swapaxes(1, 2)
        yield encode_weight(both.name.replace("gate_up", part), np.ascontiguousarray(taken), both.format)


def _parted_rows(both: Weight) -> Iterator[Weight]:
    experts, rows, width = both.shape
    if rows % 2:
        raise ModelError(f"tensor {both.name} has shape {list(both.shape)}; gates and up projections were expected")
    stored = both.data.reshape(experts, rows // 2, 2, -1)
    for index, part in enumerate(("gate", "up")):
        raw = np.ascontiguousarray(stored[:, :, index]).reshape(-1).data
        yield Weight(both.name.replace("gate_up", part), both.format, (experts, rows // 2, width), raw)


FAMILY = GptOss()

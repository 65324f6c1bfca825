"""DeepSeek V3 and R1, and Kimi K2: latent attention, and experts in groups, chosen by sigmoids with a correction.

GGUF files of all models with this attention, except Mistral 4, have the architecture deepseek2. Hugging Face stores the
projection from latents to keys and values as one tensor; GGUF stores it as two, per head, with the keys' transposed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from unspool.config import ModelConfig, RopeScaling
from unspool.errors import ModelError
from unspool.lazy import np
from unspool.models import gguf_keys, hf_keys
from unspool.models.expert_config import split_experts
from unspool.models.family import IN_LAYER
from unspool.models.glm4_moe import (
    Glm4Moe,
    SigmoidExpertConfig,
    beyond_layers,
    extra_layer_keys,
    sigmoid_expert_keys,
    sigmoid_experts_from_gguf,
    sigmoid_experts_from_hf,
    sigmoid_routing,
)
from unspool.models.layers import FeedForward, Layer, RmsNorm
from unspool.models.limits import MAX_HEAD_DIM, MAX_WIDTH
from unspool.models.mla import Mla
from unspool.models.moe import Moe
from unspool.models.qwen3_moe import TINY_QWEN3_MOE
from unspool.models.rotary import Rotary
from unspool.ops.routing import Scoring
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight, encode_weight

LATENT_EPS = 1e-6  # of the norms of latents, if the file does not have it
FLOATS = ("f32", "f16", "bf16")
LOG_UNIT = 0.1  # GGUF's yarn_log_multiplier is a multiple of this
GATING = {1: "softmax", 2: "sigmoid"}  # GGUF's numbers


@record(frozen=True)
class LatentConfig(SigmoidExpertConfig):
    """A model with latent attention; a query has `head_dim` channels, of which `rope_dim` are rotated."""

    latent_dim: int = 0
    value_dim: int = 0
    query_dim: int | None = None  # width of the latent that queries are computed from
    latent_eps: float = LATENT_EPS
    scoring: Scoring = "sigmoid"
    group_top: int = 2
    score_log: float = 0.0  # scores are multiplied by (1 + score_log · 0.1 · log(yarn's factor))²
    growth: float = 0.0

    @property
    def growth_period(self) -> int:
        return (self.rope_scaling.original_context if self.rope_scaling else 0) or self.context_length

    @property
    def score_scale(self) -> float:
        scaling, root = self.rope_scaling, 1.0
        if scaling is not None and scaling.factor > 1:
            root = 1 + 0.1 * self.score_log * math.log(scaling.factor)
        return root * root / math.sqrt(self.head_dim)


TINY_LATENT = LatentConfig(
    **vars(
        replace(
            TINY_QWEN3_MOE,
            architecture="deepseek_v3",
            num_layers=3,
            num_kv_heads=TINY_QWEN3_MOE.num_heads,
            head_dim=48,
            rope_dim=16,
            rope_style="interleaved",
            rope_scaling=RopeScaling("yarn", 4.0, original_context=64, attention_factor=1.0),
            tied_embeddings=False,
            dense_layers=(0,),
            shared_width=64,
            qkv_bias=False,
        )
    ),
    routed_scale=1.5,
    num_groups=4,
    num_used_groups=2,
    latent_dim=32,
    value_dim=32,
    query_dim=64,
    score_log=1.0,
)


class DeepseekV3(Glm4Moe):
    shapes = {"tiny-deepseek-v3": TINY_LATENT}
    gguf_rope_style = "interleaved"
    scoring: ClassVar[Scoring] = "sigmoid"
    group_top: ClassVar[int] = 2
    layer_names = Glm4Moe.layer_names | {
        "post_attention_layernorm.weight": IN_LAYER["post_attention_layernorm.weight"],
        "self_attn.q_a_proj.weight": "attn_q_a.weight",
        "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
        "self_attn.q_b_proj.weight": "attn_q_b.weight",
        "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
        "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
        "self_attn.kv_b_proj.weight": "attn_kv_b.weight",
        "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "mlp.experts.down_proj": "ffn_down_exps.weight",
    }

    # Reading -----------------------------------------------------------------------------------------------------
    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        if fields.boolean("attention_bias", False):
            fields.fail("attention_bias", "latent attention with biases is not supported")
        plain = fields.integer("qk_nope_head_dim", high=MAX_HEAD_DIM)
        turned = fields.integer("qk_rope_head_dim", high=MAX_HEAD_DIM)
        rope = hf_keys.rope_fields(fields)
        common = hf_keys.common(fields, name, head_dim=turned)
        scaled = common["rope_scaling"] is not None and rope is not None
        has_short_queries = fields.get("q_lora_rank") is not None
        own = {
            "num_kv_heads": common["num_heads"],
            "head_dim": plain + turned,
            "rope_dim": turned,
            "rope_style": "interleaved" if fields.boolean("rope_interleave", True) else "half",
        }
        return LatentConfig(
            **common | own,
            **self.experts_from_hf(fields, common["num_layers"]),
            extra_layers=fields.integer("num_nextn_predict_layers", 0, low=0, high=64),
            latent_dim=fields.integer("kv_lora_rank", high=MAX_WIDTH),
            value_dim=fields.integer("v_head_dim", high=MAX_HEAD_DIM),
            query_dim=fields.integer("q_lora_rank", high=MAX_WIDTH) if has_short_queries else None,
            scoring=self.scoring,
            group_top=self.group_top,
            score_log=(rope.optional_number("mscale_all_dim", low=0, high=1e3) or 0.0) if scaled and rope else 0.0,
            growth=(rope.optional_number("llama_4_scaling_beta", low=0, high=100) or 0.0) if rope else 0.0,
        )

    def experts_from_hf(self, fields: Fields, num_layers: int) -> dict[str, Any]:
        return sigmoid_experts_from_hf(fields, num_layers)

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        if keys.get("attention.key_length_mla") is None:
            keys.fail(
                "attention.key_length_mla",
                "it is missing: the file is older than the way to store heads' keys and values apart; convert it again",
            )
        head_dim = keys.integer("attention.key_length_mla", high=MAX_HEAD_DIM)
        common = gguf_keys.common(keys, file, experts=True, rope_style=self.gguf_rope_style, latent=True)
        extra = keys.integer("nextn_predict_layers", 0, low=0, high=common["num_layers"] - 1)
        layers, scaling = common["num_layers"] - extra, common["rope_scaling"]
        log = keys.optional_number("rope.scaling.yarn_log_multiplier", low=-1e-9, high=1e3) or 0.0
        if log and scaling is not None:  # cosines and sines are not scaled
            scaling = replace(scaling, attention_factor=1.0)
        corrected = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)  # only sigmoids are
        gating = keys.integer("expert_gating_func", 2 if corrected else 1, low=0, high=100)
        if gating not in GATING:
            keys.fail("expert_gating_func", f"{gating} is not supported; 1 (softmax) and 2 (sigmoid) are")
        has_short_queries = keys.get("attention.q_lora_rank") is not None
        own = {
            "architecture": self.name,
            "num_layers": layers,
            "num_kv_heads": common["num_heads"],
            "head_dim": head_dim,
            "rope_scaling": scaling,
        }
        return LatentConfig(
            **common | own,
            **sigmoid_experts_from_gguf(keys, file, layers) | self._normalized_from_gguf(keys),
            extra_layers=extra,
            latent_dim=keys.integer("attention.kv_lora_rank", high=MAX_WIDTH),
            value_dim=keys.integer("attention.value_length_mla", high=MAX_HEAD_DIM),
            query_dim=keys.integer("attention.q_lora_rank", high=MAX_WIDTH) if has_short_queries else None,
            latent_eps=common["norm_eps"],
            scoring="softmax" if gating == 1 else "sigmoid",
            group_top=1 if gating == 1 and self.scoring == "sigmoid" else 2,  # in DeepSeek V2's files
            score_log=log / LOG_UNIT,
            growth=keys.optional_number("attention.temperature_scale", low=-1e-9, high=100) or 0.0,
        )

    @property
    def name(self) -> str:
        return "deepseek_v3"

    def _normalized_from_gguf(self, keys: Fields) -> dict[str, Any]:
        return {"normalized": keys.boolean("expert_weights_norm", False)}

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, LatentConfig)
        if config.rope_style != self.gguf_rope_style:
            raise ModelError(f"GGUF stores {config.architecture} for {self.gguf_rope_style} rotation")
        values = gguf_keys.common_keys(config) | sigmoid_expert_keys(config) | extra_layer_keys(config)
        values |= {
            "attention.head_count_kv": 1,
            "attention.key_length": config.latent_dim + config.rope_dim,
            "attention.value_length": config.latent_dim,
            "attention.key_length_mla": config.head_dim,
            "attention.value_length_mla": config.value_dim,
            "attention.kv_lora_rank": config.latent_dim,
            "expert_gating_func": 1 if config.scoring == "softmax" else 2,
        }
        if config.query_dim is not None:
            values["attention.q_lora_rank"] = config.query_dim
        if config.growth:
            values["attention.temperature_scale"] = config.growth
            values["attention.temperature_length"] = config.growth_period
        if config.score_log:
            values["rope.scaling.yarn_log_multiplier"] = config.score_log * LOG_UNIT
            values.pop("rope.scaling.attn_factor", None)
        return values

    # Tensors -----------------------------------------------------------------------------------------------------
    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        assert isinstance(config, LatentConfig)
        if beyond_layers(name, self.layer_prefix, config.num_layers, config.extra_layers):
            return []
        found = super().canonical_weights(name, weight, config)
        if name.endswith("self_attn.kv_b_proj.weight"):
            return [part for each in found for part in _split_heads(each, config)]
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            return [part for each in found for part in split_experts(each, config, may_be_transposed=False)]
        return found

    # Layers ------------------------------------------------------------------------------------------------------
    def layer(self, config: ModelConfig, index: int) -> Layer:
        assert isinstance(config, LatentConfig)
        norm = RmsNorm(config.norm_eps)
        return Layer(self.latent_attention(config), self.feed_forward(config, index), norm=norm, ffn_norm=norm)

    def latent_attention(self, config: LatentConfig) -> Mla:
        scaling = config.rope_scaling
        return Mla(
            num_heads=config.num_heads,
            latent_dim=config.latent_dim,
            plain_dim=config.head_dim - config.rope_dim,
            value_dim=config.value_dim,
            rotary=Rotary(config.rope_dim, config.rope_theta, config.rope_style, scaling),
            scale=config.score_scale,
            norm=RmsNorm(config.latent_eps),
            query_dim=config.query_dim,
            growth=config.growth,
            period=config.growth_period,
        )

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, LatentConfig)
        layer = super().feed_forward(config, index)
        if not isinstance(layer, Moe):
            return layer
        routing = replace(sigmoid_routing(config), scoring=config.scoring, group_top=config.group_top)
        return replace(layer, routing=routing, choice_bias=config.scoring == "sigmoid")


def _split_heads(weight: Weight, config: LatentConfig) -> list[Weight]:
    """The projections from latents to keys and to values, for each head; the keys' is transposed."""
    heads, plain, values = config.num_heads, config.head_dim - config.rope_dim, config.value_dim
    if weight.shape != (heads * (plain + values), config.latent_dim):
        wanted = [heads * (plain + values), config.latent_dim]
        raise ModelError(f"tensor {weight.name} has shape {list(weight.shape)}; the model needs {wanted}")
    both = weight.dequantize().reshape(heads, plain + values, config.latent_dim)
    format = weight.format if weight.format in FLOATS else "bf16"
    keys = np.ascontiguousarray(both[:, :plain].swapaxes(1, 2))
    return [
        encode_weight(weight.name.replace("attn_kv_b", "attn_k_b"), keys, format),
        encode_weight(weight.name.replace("attn_kv_b", "attn_v_b"), np.ascontiguousarray(both[:, plain:]), format),
    ]


FAMILY = DeepseekV3()

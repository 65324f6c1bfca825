"""Nemotron-H and Nemotron 3: each layer is one block: a Mamba-2 scan, attention without rotation, or a feed-forward
without gates. Layers for multi-token prediction (MTP) are not read."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.models import expert_config, gguf_keys, hf_keys, hybrid, mamba
from unspool.models.family import Family
from unspool.models.glm4_moe import SigmoidExpertConfig, beyond_layers, sigmoid_routing
from unspool.models.layers import Layer, Mlp, RmsNorm
from unspool.models.limits import MAX_EXPERTS, MAX_HEADS, MAX_INTERMEDIATE, MAX_LAYERS, MAX_WIDTH
from unspool.models.mamba import MambaConfig
from unspool.models.moe import Moe
from unspool.models.rotary import Rotary
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight

SCAN, ATTENTION, MLP, MOE = "scan", "attention", "mlp", "moe"
# Kinds of layers, by the names that files have used for them.
KINDS = {"M": SCAN, "mamba": SCAN, "linear_attention": SCAN, "*": ATTENTION, "attention": ATTENTION}
KINDS |= {"full_attention": ATTENTION, "-": MLP, "mlp": MLP, "E": MOE, "moe": MOE}
HF_KEYS = {
    "head_dim": "mamba_head_dim",
    "state_dim": "ssm_state_size",
    "groups": "n_groups",
    "taps": "conv_kernel",
    "conv_bias": "use_conv_bias",
}
KV_HEADS, WIDTHS = "attention.head_count_kv", "feed_forward_length"
SHARED_WIDTH, LATENT_WIDTH = "expert_shared_feed_forward_length", "moe_latent_size"
EXPERT = re.compile(r"mixer\.experts\.(\d+)\.(up|down)_proj\.weight")


@record(frozen=True)
class NemotronConfig(SigmoidExpertConfig, MambaConfig):
    kinds: tuple[str, ...] = ()  # of each layer
    latent_width: int = 0  # width of the experts' input; 0: the whole row


TINY_NEMOTRON = NemotronConfig(
    architecture="nemotron_h",
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=288,
    context_length=256,
    norm_eps=1e-5,
    activation="relu2",
    mamba_heads=8,
    mamba_head_dim=16,
    mamba_state_dim=16,
    mamba_groups=2,
    kinds=(SCAN, MLP, ATTENTION, SCAN),
)
# Nemotron-Nano-9B-v2
NANO_9B = replace(
    TINY_NEMOTRON, num_layers=56, hidden_size=4480, num_heads=40, num_kv_heads=8, head_dim=128,
    intermediate_size=15_680, vocab_size=131_072, context_length=131_072, mamba_heads=128, mamba_head_dim=80,
    mamba_state_dim=128, mamba_groups=8,
    kinds=tuple(KINDS[each] for each in "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"),
)  # fmt: skip


class NemotronH(Family):
    shapes: dict[str, ModelConfig] = {"nemotron-nano-9b-v2": NANO_9B, "tiny-nemotron-h": TINY_NEMOTRON}
    gguf_activation = "relu2"
    optional_prefixes = ("backbone.", "model.")
    layer_prefix = "layers."
    whole_names = {
        "embeddings.weight": "token_embd.weight",
        "embed_tokens.weight": "token_embd.weight",
        "norm_f.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    layer_names = mamba.names("mixer.") | {
        "norm.weight": "attn_norm.weight",
        "mixer.q_proj.weight": "attn_q.weight",
        "mixer.k_proj.weight": "attn_k.weight",
        "mixer.v_proj.weight": "attn_v.weight",
        "mixer.o_proj.weight": "attn_output.weight",
        "mixer.up_proj.weight": "ffn_up.weight",
        "mixer.down_proj.weight": "ffn_down.weight",
        "mixer.gate.weight": "ffn_gate_inp.weight",
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mixer.experts.up_proj": "ffn_up_exps.weight",
        "mixer.experts.down_proj": "ffn_down_exps.weight",
        "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
        "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
        "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
        "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
    }

    # Reading -----------------------------------------------------------------------------------------------------
    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        kinds = _kinds_from_hf(fields)
        for key in ("use_bias", "mlp_bias", "attention_bias"):
            if fields.boolean(key, False):
                fields.fail(key, "biases are not supported")
        if fields.string("mamba_hidden_act", "silu") != "silu":
            fields.fail("mamba_hidden_act", "only silu is supported")
        keys = {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"}
        plain = hybrid.with_values(fields, {"num_hidden_layers": len(kinds)})
        common = hf_keys.common(plain, name, keys=keys, rotates=False, head_dim=128, activation="relu2",
                                intermediate_size=1)  # fmt: skip
        experts = _experts_from_hf(fields) if MOE in kinds else {}
        own = {"architecture": "nemotron_h_moe" if MOE in kinds else "nemotron_h"}
        if MLP not in kinds:
            own["intermediate_size"] = experts.get("expert_width", 1)
        heads = fields.integer("mamba_num_heads", high=MAX_HEADS)
        return NemotronConfig(
            **common | own,
            **experts,
            **mamba.from_hf(fields, HF_KEYS, heads),
            kinds=kinds,
        )

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        extra = keys.integer("nextn_predict_layers", 0, low=0, high=64)
        layers = keys.integer("block_count", low=extra + 1, high=MAX_LAYERS)
        kv_heads, widths = (hybrid.by_layer(keys, key, layers)[: layers - extra] for key in (KV_HEADS, WIDTHS))
        kinds = tuple(
            ATTENTION if heads else SCAN if not width else MOE if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors
            else MLP
            for layer, (heads, width) in enumerate(zip(kv_heads, widths, strict=True))
        )  # fmt: skip
        for key, values in ((KV_HEADS, kv_heads), (WIDTHS, widths)):
            if len(set(values) - {0}) > 1:
                keys.fail(key, "layers that differ in it are not supported")
        plain = hybrid.with_values(keys, {KV_HEADS: max(kv_heads) or 1, WIDTHS: max(widths) or 1})
        common = gguf_keys.common(plain, file, rotates=False, experts=True)
        return NemotronConfig(
            **common | {"num_layers": layers - extra, "activation": self.gguf_activation},
            **_experts_from_gguf(keys) if MOE in kinds else {},
            **mamba.from_gguf(keys, file),
            kinds=kinds,
            extra_layers=extra,
        )

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, NemotronConfig)
        feed_forward = {MLP: config.intermediate_size, MOE: config.expert_width}
        nothing = [0] * config.extra_layers
        return super().gguf_keys(config) | mamba.gguf_keys(config) | _expert_keys(config) | {
            "block_count": config.num_layers + config.extra_layers,
            "nextn_predict_layers": config.extra_layers,
            "attention.layer_norm_epsilon": config.norm_eps,
            KV_HEADS: [config.num_kv_heads if kind == ATTENTION else 0 for kind in config.kinds] + nothing,
            WIDTHS: [feed_forward.get(kind, 0) for kind in config.kinds] + nothing,
        }  # fmt: skip

    def ignores(self, name: str, config: ModelConfig) -> bool:
        assert isinstance(config, NemotronConfig)
        return super().ignores(name, config) or beyond_layers(name, "blk.", config.num_layers, config.extra_layers)

    def canonical_layer_name(self, rest: str) -> str | None:
        found = EXPERT.fullmatch(rest)
        return f"ffn_{found[2]}_exps.{found[1]}.weight" if found else super().canonical_layer_name(rest)

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        assert isinstance(config, NemotronConfig)
        if name.startswith("mtp."):
            return []
        return [mamba.by_gguf(each, config) for each in super().canonical_weights(name, weight, config)]

    # Layers ------------------------------------------------------------------------------------------------------
    def layer(self, config: ModelConfig, index: int) -> Layer:
        assert isinstance(config, NemotronConfig)
        kind, norm = config.kinds[index], RmsNorm(config.norm_eps)
        if kind == SCAN:
            return Layer(mamba.mixer(config), None, norm=norm)
        if kind == ATTENTION:
            return Layer(self.attention(config, index), None, norm=norm)
        feed_forward = Mlp(config.intermediate_size, config.activation) if kind == MLP else _experts(config)
        return Layer(None, feed_forward, ffn_norm=norm, ffn_norm_name="attn_norm")

    def rotary(self, config: ModelConfig, index: int) -> Rotary | None:
        return None


def _experts(config: NemotronConfig) -> Moe:
    return Moe(
        sigmoid_routing(config),
        config.expert_width,
        config.activation,
        choice_bias=True,
        shared_width=config.shared_width,
        gated=False,
        latent=config.latent_width,
    )


def _kinds_from_hf(fields: Fields) -> tuple[str, ...]:
    for key in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        value = fields.get(key)
        if value is None:
            continue
        if not isinstance(value, list | str) or not 1 <= len(value) <= MAX_LAYERS:
            fields.fail(key, f"the kinds of 1 to {MAX_LAYERS} layers were expected")
        for each in value:
            if not isinstance(each, str) or each not in KINDS:
                fields.fail(key, f"only {', '.join(KINDS)} are supported")
        return tuple(KINDS[each] for each in value)
    return fields.fail("layers_block_type", "it is missing")


def _experts_from_hf(fields: Fields) -> dict[str, Any]:
    experts = fields.integer("n_routed_experts", high=MAX_EXPERTS)
    groups = fields.integer("n_group", 1, high=experts)
    shared = fields.integer("moe_shared_expert_intermediate_size", high=MAX_INTERMEDIATE)
    latent = fields.get("moe_latent_size")
    return {
        "num_experts": experts,
        "num_used_experts": fields.integer("num_experts_per_tok", high=experts),
        "expert_width": fields.integer("moe_intermediate_size", high=MAX_INTERMEDIATE),
        "shared_width": shared if fields.integer("n_shared_experts", 1, low=0) else 0,
        "normalized": fields.boolean("norm_topk_prob", True),
        "routed_scale": fields.number("routed_scaling_factor", 1.0, low=0, high=1e6),
        "num_groups": groups,
        "num_used_groups": fields.integer("topk_group", 1, high=groups),
        "latent_width": 0 if latent is None else fields.integer("moe_latent_size", high=MAX_WIDTH),
    }


def _experts_from_gguf(keys: Fields) -> dict[str, Any]:
    experts = expert_config.from_gguf(hybrid.with_values(keys, {WIDTHS: 1}))
    groups = keys.integer("expert_group_count", 1, high=experts["num_experts"])
    return experts | {
        "shared_width": keys.integer(SHARED_WIDTH, 0, low=0, high=MAX_INTERMEDIATE),
        "normalized": keys.boolean("expert_weights_norm", True),
        "routed_scale": keys.number("expert_weights_scale", 1.0, low=0, high=1e6),
        "num_groups": groups,
        "num_used_groups": keys.integer("expert_group_used_count", 1, high=groups),
        "latent_width": keys.integer(LATENT_WIDTH, 0, low=0, high=MAX_WIDTH),
    }


def _expert_keys(config: NemotronConfig) -> dict[str, Any]:
    """The keys that `_experts_from_gguf` reads back."""
    if not config.num_experts:
        return {}
    if MLP in config.kinds and config.expert_width != config.intermediate_size:
        raise ModelError(f"GGUF files of {config.architecture} with experts have no feed-forward of another width")
    return expert_config.gguf_keys(config) | {
        "expert_shared_count": 1 if config.shared_width else 0,
        SHARED_WIDTH: config.shared_width,
        "expert_weights_norm": config.normalized,
        "expert_weights_scale": config.routed_scale,
        "expert_group_count": config.num_groups,
        "expert_group_used_count": config.num_used_groups,
        **({LATENT_WIDTH: config.latent_width} if config.latent_width else {}),
    }


FAMILY = NemotronH()

"""From a Hugging Face config.json to a ModelConfig. What we do not know how to honour is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from unspool.config import ModelConfig, RopeScaling
from unspool.weights.fields import Fields
from unspool.weights.limits import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_THETA,
    MAX_VOCABULARY,
    MAX_WIDTH,
    check_config,
    even_share,
)

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
DEFAULT_THETA = {"gemma3": 1_000_000.0}
GEMMA3_PATTERN = 6
GEMMA3_LOCAL_THETA = 10_000.0

# Ways to store 8-bit floats; whatever else they may store is refused by its type.
EIGHT_BIT = ("fp8", "fbgemm_fp8", "compressed-tensors")


def config_from_json(path: Path, values: dict[str, Any]) -> ModelConfig:
    """`values` is the content of the config.json at `path`."""
    fields = Fields(path, values)
    architecture = _architecture(fields)
    for option in ("attention_bias", "mlp_bias"):
        if fields.boolean(option, False):
            fields.fail(option, "biases there are not supported")
    quantized = fields.get("quantization_config")
    if quantized is not None and not (isinstance(quantized, dict) and quantized.get("quant_method") in EIGHT_BIT):
        fields.fail("quantization_config", "of quantized directories those of 8-bit floats are read; use a GGUF file")
    heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    hidden = fields.integer("hidden_size", high=MAX_WIDTH)
    default_dim = 256 if architecture == "gemma3" else even_share(hidden, heads)
    head_dim = fields.integer("head_dim", default_dim, high=MAX_HEAD_DIM)
    config: dict[str, Any] = {
        "architecture": architecture,
        "num_layers": fields.integer("num_hidden_layers", high=MAX_LAYERS),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads, high=MAX_HEADS),
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size", high=MAX_INTERMEDIATE),
        "vocab_size": fields.integer("vocab_size", high=MAX_VOCABULARY),
        "context_length": fields.integer("max_position_embeddings", high=MAX_CONTEXT),
        "norm_eps": fields.number("rms_norm_eps", 1e-6, low=0, high=1),
        "rope_style": "half",
        "rope_dim": head_dim,
        "tied_embeddings": fields.boolean("tie_word_embeddings", architecture == "gemma3"),
        "activation": _activation(fields),
    }
    config |= _rope(fields, architecture, config["context_length"]) | _window(fields, architecture)
    if architecture == "gemma3":
        config |= _gemma3(fields, config)
    return check_config(path, ModelConfig(**config))


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        fields.fail("architectures", "one name was expected")
    if names[0] not in ARCHITECTURES:
        fields.fail("architectures", f"{names[0][:60]!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[names[0]]


def _activation(fields: Fields) -> str:
    key = "hidden_activation" if fields.get("hidden_activation") is not None else "hidden_act"
    default = "gelu_pytorch_tanh" if fields.get("model_type") == "gemma3_text" else "silu"
    name = fields.string(key, default)
    if name not in ACTIVATIONS:
        fields.fail(key, f"{name[:60]!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _rope(fields: Fields, architecture: str, context: int) -> dict[str, Any]:
    """Base and scaling, in the old fields or in the new `rope_parameters` (one set, or one for each kind of layer)."""
    default = DEFAULT_THETA.get(architecture, 10_000.0)
    theta = fields.number("rope_theta", default, low=1, high=MAX_THETA)
    local: float | None = None
    if architecture == "gemma3":
        local = fields.number("rope_local_base_freq", GEMMA3_LOCAL_THETA, low=1, high=MAX_THETA)
    scaling = fields.object("rope_scaling")
    parameters = fields.object("rope_parameters")
    if parameters is not None:
        sliding = parameters.object("sliding_attention")
        if sliding is not None:
            if _scaling(sliding, context) is not None:
                sliding.fail("rope_type", "scaling of the sliding layers is not supported")
            local = sliding.number("rope_theta", local, low=1, high=MAX_THETA)
        scaling = parameters.object("full_attention") or parameters
        theta = scaling.number("rope_theta", theta, low=1, high=MAX_THETA)
    return {
        "rope_theta": theta,
        "rope_theta_local": local if architecture == "gemma3" else None,
        "rope_scaling": None if scaling is None else _scaling(scaling, context),
    }


def _scaling(fields: Fields, context: int) -> RopeScaling | None:
    key = "rope_type" if fields.get("rope_type") is not None else "type"
    kind = fields.string(key, "default")
    if fields.number("partial_rotary_factor", 1.0, low=0, high=1) != 1:
        fields.fail("partial_rotary_factor", "partial rotation is not supported")
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        fields.fail(key, f"{kind[:60]!r} is not supported; default, linear, llama3 and yarn are")
    factor = fields.number("factor", low=0, high=1e6)
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = fields.integer("original_max_position_embeddings", context, high=MAX_CONTEXT)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor,
            original_context=original,
            low_freq_factor=fields.number("low_freq_factor", low=0, high=1e6),
            high_freq_factor=fields.number("high_freq_factor", low=0, high=1e6),
        )
    for option in ("mscale", "mscale_all_dim"):
        if fields.get(option) is not None:
            fields.fail(option, "this variant of yarn is not supported")
    if not fields.boolean("truncate", True):
        fields.fail("truncate", "yarn without truncation is not supported")
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        attention_factor=fields.optional_number("attention_factor", low=0, high=1e3),
        beta_fast=fields.number("beta_fast", 32.0, low=0, high=1e6),
        beta_slow=fields.number("beta_slow", 1.0, low=0, high=1e6),
    )


def _window(fields: Fields, architecture: str) -> dict[str, Any]:
    if architecture in ("qwen2", "qwen3"):
        # Qwen names a window and seldom uses it; where it does, only the layers above max_window_layers slide.
        if fields.boolean("use_sliding_window", False):
            fields.fail("use_sliding_window", "Qwen's sliding layers are not supported")
        return {}
    if architecture == "llama" or fields.get("sliding_window") is None:
        return {}
    return {"sliding_window": fields.integer("sliding_window", high=MAX_CONTEXT)}


def _gemma3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    if fields.boolean("use_bidirectional_attention", False):
        fields.fail("use_bidirectional_attention", "attention that looks ahead is not supported")
    key = "_sliding_window_pattern" if fields.get("_sliding_window_pattern") is not None else "sliding_window_pattern"
    pattern = fields.integer(key, GEMMA3_PATTERN, high=MAX_LAYERS)
    kinds = fields.get("layer_types")
    if kinds is not None:
        expected = [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
            for layer in range(config["num_layers"])
        ]
        if kinds != expected:
            fields.fail("layer_types", f"only every {pattern}th layer being global is supported")
    scalar = fields.number("query_pre_attn_scalar", 256.0, low=0, high=1e6)
    return {
        "sliding_window": fields.integer("sliding_window", 4096, high=MAX_CONTEXT),
        "sliding_pattern": pattern,
        "attention_scale": None if scalar == config["head_dim"] else 1 / math.sqrt(scalar),
        "embedding_scale": math.sqrt(config["hidden_size"]),
        "logit_softcap": fields.optional_number("final_logit_softcapping", low=0, high=1e6),
        "attention_softcap": fields.optional_number("attn_logit_softcapping", low=0, high=1e6),
    }


# --- names -------------------------------------------------------------------------------------------------------

WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
GEMMA3_IN_LAYER = IN_LAYER | {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}


def canonical_name(name: str, config: ModelConfig) -> str | None:
    """GGUF's name for a tensor; None for one that says nothing new; the name itself where we know no other."""
    if name.endswith(".rotary_emb.inv_freq"):  # a table that old checkpoints saved; the config determines it
        return None
    if name == "lm_head.weight" and config.tied_embeddings:  # a second copy of the embedding
        return None
    if name in WHOLE:
        return WHOLE[name]
    parts = name.split(".", 3)
    table = GEMMA3_IN_LAYER if config.architecture == "gemma3" else IN_LAYER
    if len(parts) == 4 and parts[:2] == ["model", "layers"] and parts[3] in table:
        return f"blk.{parts[2]}.{table[parts[3]]}"
    return name

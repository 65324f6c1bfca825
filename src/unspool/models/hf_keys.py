"""Shared readers of a Hugging Face config.json. What we do not know how to honour is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unspool.config import Activation, RopeScaling
from unspool.models.limits import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_THETA,
    MAX_VOCABULARY,
    MAX_WIDTH,
    even_share,
)
from unspool.weights.fields import Fields

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def common(
    fields: Fields,
    name: str,
    *,
    keys: Mapping[str, str] | None = None,
    theta: float = 10_000.0,
    rotates: bool = True,
    head_dim: int | None = None,
    tied_embeddings: bool = False,
    activation: str = "silu",
    intermediate_size: int | None = None,
) -> dict[str, Any]:
    """ModelConfig's fields. Most arguments are the family's values for files that leave them out.

    `keys` has the family's own names of fields. Without `head_dim`, heads share the width of the model evenly.
    """
    keys = keys or {}

    def size(key: str, default: int | None = None, *, high: int) -> int:
        return fields.integer(keys.get(key, key), default, high=high)

    heads = size("num_attention_heads", high=MAX_HEADS)
    hidden = size("hidden_size", high=MAX_WIDTH)
    head_dim = size("head_dim", head_dim or even_share(hidden, heads), high=MAX_HEAD_DIM)
    context = size("max_position_embeddings", high=MAX_CONTEXT)
    theta, scaling = rope(fields, context, theta) if rotates else (theta, None)
    has_bias = fields.boolean("attention_bias", False)
    return {
        "architecture": name,
        "num_layers": size("num_hidden_layers", high=MAX_LAYERS),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": size("num_key_value_heads", heads, high=MAX_HEADS),
        "head_dim": head_dim,
        "intermediate_size": size("intermediate_size", intermediate_size, high=MAX_INTERMEDIATE),
        "vocab_size": size("vocab_size", high=MAX_VOCABULARY),
        "context_length": context,
        "norm_eps": fields.number(keys.get("rms_norm_eps", "rms_norm_eps"), 1e-6, low=0, high=1),
        "rope_theta": theta,
        "rope_style": "half",
        "rope_dim": head_dim if rotates else 0,
        "rope_scaling": scaling,
        "tied_embeddings": fields.boolean("tie_word_embeddings", tied_embeddings),
        "activation": activation_of(fields, activation, keys.get("hidden_act", "hidden_act")),
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": fields.boolean("mlp_bias", False),
    }


def activation_of(fields: Fields, default: str = "silu", key: str = "hidden_act") -> Activation:
    if fields.get("hidden_activation") is not None:
        key = "hidden_activation"
    name = fields.string(key, default)
    if name not in ACTIVATIONS:
        fields.fail(key, f"{name[:60]!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def window(fields: Fields) -> int | None:
    """The sliding window, where there is one."""
    return None if fields.get("sliding_window") is None else fields.integer("sliding_window", high=MAX_CONTEXT)


def sliding_layers(fields: Fields, num_layers: int) -> tuple[bool, ...] | None:
    """Which layers have the window, where `layer_types` says so."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        fields.fail("layer_types", f"a list of the kinds of {num_layers} layers was expected")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            fields.fail("layer_types", "only full_attention and sliding_attention are supported")
    return tuple(kind == "sliding_attention" for kind in kinds)


def rope(fields: Fields, context: int, default_theta: float) -> tuple[float, RopeScaling | None]:
    """Base and scaling, in the old fields or in `rope_parameters` (one set, or one for each kind of layer)."""
    theta = fields.number("rope_theta", default_theta, low=1, high=MAX_THETA)
    chosen = fields.object("rope_scaling")
    parameters = fields.object("rope_parameters")
    if parameters is not None:
        chosen = parameters.object("full_attention") or parameters
        theta = chosen.number("rope_theta", theta, low=1, high=MAX_THETA)
    return theta, None if chosen is None else _scaling(chosen, context)


def local_rope(fields: Fields) -> tuple[float | None, RopeScaling | None]:
    """Base and scaling of the sliding layers, where they have their own."""
    theta = fields.optional_number("rope_local_base_freq", low=1, high=MAX_THETA)
    parameters = fields.object("rope_parameters")
    sliding = None if parameters is None else parameters.object("sliding_attention")
    if sliding is None:
        return theta, None
    context = fields.integer("max_position_embeddings", high=MAX_CONTEXT)
    return sliding.optional_number("rope_theta", low=1, high=MAX_THETA) or theta, _scaling(sliding, context)


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
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        attention_factor=fields.optional_number("attention_factor", low=0, high=1e3),
        beta_fast=fields.number("beta_fast", 32.0, low=0, high=1e6),
        beta_slow=fields.number("beta_slow", 1.0, low=0, high=1e6),
        truncate=fields.boolean("truncate", True),
    )

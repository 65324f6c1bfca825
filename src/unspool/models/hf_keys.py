"""Shared readers of a Hugging Face config.json. A setting that is not supported is refused by its name."""

from __future__ import annotations

import math
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
    rotated: float = 1.0,
    head_dim: int | None = None,
    tied_embeddings: bool = False,
    activation: str = "silu",
    intermediate_size: int | None = None,
) -> dict[str, Any]:
    """ModelConfig's fields. Most arguments are the family's defaults for files that omit a field.

    `keys` has the family's own names of fields. Without `head_dim`, heads divide the model's width evenly.
    """
    keys = keys or {}

    def own(key: str) -> str:
        return keys.get(key, key)

    def size(key: str, default: int | None = None, *, high: int) -> int:
        return fields.integer(own(key), default, high=high)

    heads = size("num_attention_heads", high=MAX_HEADS)
    hidden = size("hidden_size", high=MAX_WIDTH)
    head_dim = size("head_dim", head_dim or even_share(hidden, heads), high=MAX_HEAD_DIM)
    context = size("max_position_embeddings", high=MAX_CONTEXT)
    rope_dim = _rotated_channels(fields, head_dim, own("partial_rotary_factor"), rotated) if rotates else 0
    theta, scaling = rope(fields, context, theta, rope_dim) if rotates else (theta, None)
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
        "norm_eps": fields.number(own("rms_norm_eps"), 1e-6, low=0, high=1),
        "rope_theta": theta,
        "rope_style": "half",
        "rope_dim": rope_dim,
        "rope_scaling": scaling,
        "tied_embeddings": fields.boolean("tie_word_embeddings", tied_embeddings),
        "activation": activation_of(fields, activation, own("hidden_act")),
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
    """The sliding window, or None."""
    return None if fields.get("sliding_window") is None else fields.integer("sliding_window", high=MAX_CONTEXT)


def sliding_layers(fields: Fields, num_layers: int) -> tuple[bool, ...] | None:
    """Which layers have the window, if the file has `layer_types`."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        fields.fail("layer_types", f"a list of the kinds of {num_layers} layers was expected")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            fields.fail("layer_types", "only full_attention and sliding_attention are supported")
    return tuple(kind == "sliding_attention" for kind in kinds)


def windows(fields: Fields, num_layers: int, default: tuple[bool, ...] | None = None) -> dict[str, Any]:
    """ModelConfig's two fields of sliding windows; `default` lists the sliding layers for files that do not."""
    size, layers = window(fields), sliding_layers(fields, num_layers) or default
    if size is None or (layers is not None and not any(layers)):
        return {"sliding_window": None, "sliding_layers": None}
    return {"sliding_window": size, "sliding_layers": None if layers is None or all(layers) else layers}


def rope_fields(fields: Fields) -> Fields | None:
    """The fields about positions, under their new or their old name; for models with sliding layers, of the global
    ones."""
    parameters = fields.object("rope_parameters")
    if parameters is None:
        return fields.object("rope_scaling")
    return parameters.object("full_attention") or parameters


def _rotated_channels(fields: Fields, head_dim: int, key: str, default: float) -> int:
    """Rotated channels of a head. `key` is the family's name for their share of the head."""
    share = fields.number(key, default, low=0, high=1)
    inner = rope_fields(fields)
    if inner is not None:
        share = inner.number("partial_rotary_factor", share, low=0, high=1)
    return int(head_dim * share)


def rope(fields: Fields, context: int, default_theta: float, dim: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling for `dim` rotated channels."""
    chosen = rope_fields(fields)
    theta = fields.number("rope_theta", default_theta, low=1, high=MAX_THETA)
    if chosen is not None:
        theta = chosen.number("rope_theta", theta, low=1, high=MAX_THETA)
    if fields.get("original_max_position_embeddings") is None:
        original = context
    else:
        original = fields.integer("original_max_position_embeddings", high=MAX_CONTEXT)
    return theta, None if chosen is None else scaling(chosen, context, original, dim)


def local_rope(fields: Fields, dim: int) -> tuple[float | None, RopeScaling | None]:
    """Base and scaling of the sliding layers, if they differ from the global layers'."""
    theta = fields.optional_number("rope_local_base_freq", low=1, high=MAX_THETA)
    parameters = fields.object("rope_parameters")
    sliding = None if parameters is None else parameters.object("sliding_attention")
    if sliding is None:
        return theta, None
    context = fields.integer("max_position_embeddings", high=MAX_CONTEXT)
    found = scaling(sliding, context, context, dim)
    return sliding.optional_number("rope_theta", low=1, high=MAX_THETA) or theta, found


def scaling(fields: Fields, context: int, original: int, dim: int) -> RopeScaling | None:
    """How the model extends its context; `original` is the trained context, unless these fields contain it.

    Dynamic scaling changes nothing up to max_position_embeddings, and no model here reads further. mRoPE describes
    positions of images; text has ordinary positions.
    """
    key = "rope_type" if fields.get("rope_type") is not None else "type"
    kind = fields.string(key, "default")
    if kind in ("default", "dynamic", "mrope"):
        return None
    if kind not in ("linear", "llama3", "yarn", "longrope", "su"):
        fields.fail(
            key, f"{kind[:60]!r} is not supported; default, linear, dynamic, llama3, yarn, longrope and mrope are"
        )
    original = fields.integer("original_max_position_embeddings", original, high=MAX_CONTEXT)
    if kind in ("longrope", "su"):
        return _longrope(fields, context, original, dim)
    factor = fields.number("factor", low=0, high=1e6)
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor,
            original_context=original,
            low_freq_factor=fields.number("low_freq_factor", low=0, high=1e6),
            high_freq_factor=fields.number("high_freq_factor", low=0, high=1e6),
        )
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        attention_factor=_yarn_attention_factor(fields, factor),
        beta_fast=fields.number("beta_fast", 32.0, low=0, high=1e6),
        beta_slow=fields.number("beta_slow", 1.0, low=0, high=1e6),
        truncate=fields.boolean("truncate", True),
    )


def _yarn_attention_factor(fields: Fields, factor: float) -> float | None:
    """The factor from the file, or computed from its two multipliers of the default factor's logarithm."""
    named = fields.optional_number("attention_factor", low=0, high=1e3)
    over, under = (fields.get(key) or None for key in ("mscale", "mscale_all_dim"))
    if named is not None or over is None or under is None:
        return named
    log = 0.1 * math.log(factor) if factor > 1 else 0.0
    over, under = (fields.number(key, low=0, high=1e3) for key in ("mscale", "mscale_all_dim"))
    return (over * log + 1) / (under * log + 1)


def _longrope(fields: Fields, context: int, original: int, dim: int) -> RopeScaling:
    """Choose the factors once, by the model's context, so that an answer does not depend on its prompt's length."""
    short, long = (fields.numbers(f"{name}_factor", dim // 2, low=0, high=1e6) for name in ("short", "long"))
    return RopeScaling(
        "longrope",
        context / original,
        original_context=original,
        attention_factor=fields.optional_number("attention_factor", low=0, high=1e3),
        short_factors=short,
        long_factors=long,
    )

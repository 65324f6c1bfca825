"""Reads the GGUF keys that most families share, and writes them for the files that we write."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig, RopeScaling, RopeStyle
from unspool.errors import ModelError
from unspool.models.limits import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_THETA,
    MAX_WIDTH,
    even_share,
    every_nth_is_global,
)
from unspool.models.rotary import Rotary, usual_attention_factor
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile

FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
RMS_EPS, LAYER_NORM_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


def common(
    keys: Fields,
    file: GGUFFile,
    *,
    theta: float = 10_000.0,
    rotates: bool = True,
    eps_key: str = RMS_EPS,
    rope_style: RopeStyle = "half",
    experts: bool = False,
    latent: bool = False,
) -> dict[str, Any]:
    """ModelConfig's fields. `theta` is the family's default, for files without one. `experts`: the file may have
    experts. `latent`: keys and values are latents, which other keys describe."""
    if not experts and keys.integer("expert_count", 0, low=0):
        keys.fail("expert_count", f"a {keys.prefix.removesuffix('.')} with experts is not supported")
    heads = keys.integer("attention.head_count", high=MAX_HEADS)
    hidden = keys.integer("embedding_length", high=MAX_WIDTH)
    head_dim = keys.integer("attention.key_length", even_share(hidden, heads), high=MAX_HEAD_DIM)
    value_dim = keys.integer("attention.value_length", head_dim)
    if value_dim != head_dim and not latent:
        keys.fail("attention.value_length", f"{value_dim} differs from attention.key_length {head_dim}")
    window = keys.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
    rope_dim = keys.integer("rope.dimension_count", head_dim, high=MAX_HEAD_DIM) if rotates else 0
    return {
        "architecture": keys.prefix.removesuffix("."),
        "num_layers": keys.integer("block_count", high=MAX_LAYERS),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": keys.integer("attention.head_count_kv", heads, high=MAX_HEADS),
        "head_dim": head_dim,
        "intermediate_size": keys.integer("feed_forward_length", high=MAX_INTERMEDIATE),
        "vocab_size": _vocab_size(file, keys),
        "context_length": keys.integer("context_length", high=MAX_CONTEXT),
        "norm_eps": keys.number(eps_key, low=0, high=1),
        "rope_theta": keys.number("rope.freq_base", theta, low=1, high=MAX_THETA),
        "rope_style": rope_style,
        "rope_dim": rope_dim,
        "rope_scaling": _rope_scaling(keys, file, rope_dim) if rotates else None,
        "tied_embeddings": "output.weight" not in file.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors,
        "output_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": window or None,
    }


def sliding_layers(keys: Fields, num_layers: int, pattern: int | None = None) -> tuple[bool, ...] | None:
    """Which layers have the window: from a list of booleans, or a number n if every n-th layer is global."""
    key = "attention.sliding_window_pattern"
    value = keys.get(key)
    if isinstance(value, list):
        if len(value) != num_layers or any(type(each) is not bool for each in value):
            keys.fail(key, f"a list of {num_layers} times true or false was expected")
        return tuple(value)
    if value is None and pattern is None:
        return None
    return every_nth_is_global(keys.integer(key, pattern, high=MAX_LAYERS), num_layers)


def numbers_of_layers(keys: Fields, key: str, layers: int, high: int) -> list[int]:
    """One number per layer, from a list or from a single number for all layers."""
    value = keys.get(key)
    if not isinstance(value, list):
        return [keys.integer(key, high=high)] * layers
    if len(value) != layers or any(type(each) is not int or not 1 <= each <= high for each in value):
        keys.fail(key, f"a list of {layers} numbers from 1 to {high} was expected")
    return value


def _vocab_size(file: GGUFFile, keys: Fields) -> int:
    """The rows of the embedding, which must equal the number of tokens in the file's vocabulary."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing")
    rows = embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    listed = keys.integer("vocab_size", rows)
    if isinstance(tokens, Sequence) and not isinstance(tokens, str):
        listed = len(tokens)
    if listed != rows:
        raise ModelError(f"{file.path}: the vocabulary lists {listed} tokens; 'token_embd.weight' has {rows} rows")
    return rows


def _rope_scaling(keys: Fields, file: GGUFFile, dim: int) -> RopeScaling | None:
    kind = keys.string("rope.scaling.type", "none")
    if LONG_FACTORS in file.tensors:
        return _longrope(keys, file, dim)
    factor = keys.optional_number("rope.scaling.factor", low=0, high=1e6)
    if factor is None and keys.get("rope.scale_linear") is not None:  # the older name of the key
        kind, factor = "linear", keys.number("rope.scale_linear", low=0, high=1e6)
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return None
    if kind == "linear" and factor is not None:
        return RopeScaling("linear", factor)
    if kind != "yarn":
        keys.fail("rope.scaling.type", f"{kind[:60]!r} is not supported; none, linear and yarn are")
    if factor is None:
        keys.fail("rope.scaling.factor", "it is missing")
    return RopeScaling(
        "yarn",
        factor,
        original_context=keys.integer("rope.scaling.original_context_length", high=MAX_CONTEXT),
        attention_factor=_yarn_attention_factor(keys, factor),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0, low=0, high=1e6),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0, low=0, high=1e6),
    )


def _yarn_attention_factor(keys: Fields, factor: float) -> float | None:
    """GGUF's number multiplies the default factor; RopeScaling's number replaces it."""
    own = keys.optional_number("rope.scaling.attn_factor", low=0, high=1e3)
    log = 0.1 * math.log(factor) if factor > 1 else 0.0
    divisor = 1.0
    if keys.get("rope.scaling.yarn_log_multiplier") is not None:
        divisor = keys.number("rope.scaling.yarn_log_multiplier", low=-1e-9, high=1e3) * log + 1
    return None if own is None and divisor == 1 else (own or 1.0) * (log + 1) / divisor


def _longrope(keys: Fields, file: GGUFFile, dim: int) -> RopeScaling:
    context = keys.integer("context_length", high=MAX_CONTEXT)
    original = keys.integer("rope.scaling.original_context_length", context, high=MAX_CONTEXT)
    found = []
    for name in (SHORT_FACTORS, LONG_FACTORS):
        tensor = file.tensors.get(name)
        if tensor is None or tensor.shape != (dim // 2,):
            raise ModelError(f"{file.path}: a tensor {name!r} of {dim // 2} numbers was expected")
        values = tuple(float(each) for each in tensor.floats())
        if not all(0 < each < 1e6 for each in values):
            raise ModelError(f"{file.path}: tensor {name!r} has values that cannot divide the speeds of rotation")
        found.append(values)
    return RopeScaling(
        "longrope",
        context / original,
        original_context=original,
        attention_factor=keys.optional_number("rope.scaling.attn_factor", low=0, high=1e3),
        short_factors=found[0],
        long_factors=found[1],
    )


def common_keys(config: ModelConfig, *, eps_key: str = RMS_EPS) -> dict[str, Any]:
    """The keys from which `common` reads `config` back."""
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        eps_key: config.norm_eps,
        "vocab_size": config.vocab_size,
    }
    if config.rope_dim:
        values |= {"rope.freq_base": config.rope_theta, "rope.dimension_count": config.rope_dim}
    if config.sliding_window is not None:
        values["attention.sliding_window"] = config.sliding_window
    if config.sliding_layers is not None:
        values["attention.sliding_window_pattern"] = list(config.sliding_layers)
    return values | _scaling_keys(config.rope_scaling)


def _scaling_keys(scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys of a RopeScaling, without the factors of llama3 and longrope, which GGUF stores as tensors:
    `rope_tensors`."""
    if scaling is None or scaling.kind == "llama3":
        return {}
    values: dict[str, Any] = {"rope.scaling.type": scaling.kind}
    if scaling.kind == "linear":
        return values | {"rope.scaling.factor": scaling.factor}
    values["rope.scaling.original_context_length"] = scaling.original_context
    if scaling.kind == "longrope":
        return values | {"rope.scaling.attn_factor": scaling.attention_factor or usual_attention_factor(scaling)}
    values["rope.scaling.factor"] = scaling.factor
    values["rope.scaling.yarn_beta_fast"] = scaling.beta_fast
    values["rope.scaling.yarn_beta_slow"] = scaling.beta_slow
    if scaling.attention_factor is not None:
        values["rope.scaling.attn_factor"] = scaling.attention_factor / usual_attention_factor(scaling)
    return values


def rope_tensors(config: ModelConfig) -> dict[str, array[float]]:
    """The numbers of a config that GGUF stores as tensors: the divisors of rotation frequencies."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind not in ("llama3", "longrope"):
        return {}
    if scaling.kind == "longrope":
        return {SHORT_FACTORS: array("f", scaling.short_factors), LONG_FACTORS: array("f", scaling.long_factors)}
    rotary = Rotary(config.rope_dim, config.rope_theta, config.rope_style, scaling)
    slowed, plain = rotary.rope().inv_freq, replace(rotary, scaling=None).rope().inv_freq
    return {FACTORS: array("f", (a / b for a, b in zip(plain, slowed, strict=True)))}

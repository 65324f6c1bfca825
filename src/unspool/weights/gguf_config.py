"""From GGUF's keys to a ModelConfig, and back for the models we write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from unspool.config import ModelConfig, RopeScaling
from unspool.errors import ModelError
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.limits import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_THETA,
    MAX_WIDTH,
    check_config,
    even_share,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
GEMMA3_PATTERN = 6  # five sliding layers, then a global one; older files do not say it
GEMMA3_LOCAL_THETA = 10_000.0
GEMMA3_27B_LAYERS = 62  # the one size whose attention scale is not 1 / sqrt(head_dim)


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    architecture = Fields(file.path, file.metadata, "general.").string("architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{file.path}: architecture {architecture[:60]!r} is not supported; supported: {known}")
    fields = Fields(file.path, file.metadata, f"{architecture}.")
    if fields.integer("expert_count", 0, low=0):
        fields.fail("expert_count", "mixtures of experts are not supported")
    heads = fields.integer("attention.head_count", high=MAX_HEADS)
    hidden = fields.integer("embedding_length", high=MAX_WIDTH)
    head_dim = fields.integer("attention.key_length", even_share(hidden, heads), high=MAX_HEAD_DIM)
    value_dim = fields.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        fields.fail("attention.value_length", f"{value_dim} differs from attention.key_length {head_dim}")
    config: dict[str, Any] = {
        "architecture": architecture,
        "num_layers": fields.integer("block_count", high=MAX_LAYERS),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", heads, high=MAX_HEADS),
        "head_dim": head_dim,
        "intermediate_size": fields.integer("feed_forward_length", high=MAX_INTERMEDIATE),
        "vocab_size": _vocab_size(file, fields),
        "context_length": fields.integer("context_length", high=MAX_CONTEXT),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon", low=0, high=1),
        "rope_theta": fields.number("rope.freq_base", 10_000.0, low=1, high=MAX_THETA),
        "rope_style": "interleaved" if architecture == "llama" else "half",
        "rope_dim": fields.integer("rope.dimension_count", head_dim, high=MAX_HEAD_DIM),
        "rope_scaling": _rope_scaling(fields),
        "tied_embeddings": "output.weight" not in file.tensors,
    }
    if architecture == "gemma3":
        config |= _gemma3(fields, config)
    elif fields.integer("attention.sliding_window", 0, low=0):
        config["sliding_window"] = fields.integer("attention.sliding_window", high=MAX_CONTEXT)
    return check_config(file.path, ModelConfig(**config))


def _vocab_size(file: GGUFFile, fields: Fields) -> int:
    """The rows of the embedding, which must be the number of tokens that the file's vocabulary lists."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing")
    rows = embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    listed = fields.integer("vocab_size", rows)
    if isinstance(tokens, Sequence) and not isinstance(tokens, str):
        listed = len(tokens)
    if listed != rows:
        raise ModelError(f"{file.path}: the vocabulary lists {listed} tokens; 'token_embd.weight' has {rows} rows")
    return rows


def _rope_scaling(fields: Fields) -> RopeScaling | None:
    kind = fields.string("rope.scaling.type", "none")
    factor = fields.optional_number("rope.scaling.factor", low=0, high=1e6)
    if factor is None and fields.get("rope.scale_linear") is not None:  # the key's first name
        kind, factor = "linear", fields.number("rope.scale_linear", low=0, high=1e6)
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return None
    if kind == "linear" and factor is not None:
        return RopeScaling("linear", factor)
    if kind != "yarn":
        fields.fail("rope.scaling.type", f"{kind[:60]!r} is not supported; none, linear and yarn are")
    if factor is None:
        fields.fail("rope.scaling.factor", "it is missing")
    attention = fields.optional_number("rope.scaling.attn_factor", low=0, high=1e3)
    return RopeScaling(
        "yarn",
        factor,
        original_context=fields.integer("rope.scaling.original_context_length", high=MAX_CONTEXT),
        # GGUF's number multiplies the usual factor, RopeScaling's replaces it
        attention_factor=None if attention is None else attention * (0.1 * math.log(factor) + 1),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, low=0, high=1e6),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, low=0, high=1e6),
    )


def _gemma3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    width = config["head_dim"]
    if config["num_layers"] == GEMMA3_27B_LAYERS:
        width = config["hidden_size"] // config["num_heads"]
    return {
        "activation": "gelu_tanh",
        "sliding_window": fields.integer("attention.sliding_window", high=MAX_CONTEXT),
        "sliding_pattern": fields.integer("attention.sliding_window_pattern", GEMMA3_PATTERN, high=MAX_LAYERS),
        "rope_theta_local": fields.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA, low=1, high=MAX_THETA),
        "rope_theta": fields.number("rope.freq_base", 1_000_000.0, low=1, high=MAX_THETA),
        "attention_scale": None if width == config["head_dim"] else 1 / math.sqrt(width),
        "embedding_scale": math.sqrt(config["hidden_size"]),
        "logit_softcap": fields.optional_number("final_logit_softcapping", low=0, high=1e6),
        "attention_softcap": fields.optional_number("attn_logit_softcapping", low=0, high=1e6),
    }


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    """The keys that `config_from_gguf` reads back as `config`."""
    if config.architecture not in ARCHITECTURES:
        raise ModelError(f"architecture {config.architecture!r} has no GGUF keys; {', '.join(ARCHITECTURES)} have")
    style = "interleaved" if config.architecture == "llama" else "half"
    if config.rope_style != style:
        raise ModelError(f"GGUF stores {config.architecture} for {style} rotation, not {config.rope_style}")
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.rope_dim,
        "vocab_size": config.vocab_size,
    }
    if config.sliding_window is not None:
        values["attention.sliding_window"] = config.sliding_window
    if config.sliding_pattern is not None:
        values["attention.sliding_window_pattern"] = config.sliding_pattern
    if config.rope_theta_local is not None:
        values["rope.freq_base_swa"] = config.rope_theta_local
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        raise ModelError("GGUF has no keys for rope scaling 'llama3'; its files carry the tensor rope_freqs.weight")
    if scaling is not None:
        values |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
        if scaling.kind == "yarn":
            values["rope.scaling.original_context_length"] = scaling.original_context
            values["rope.scaling.yarn_beta_fast"] = scaling.beta_fast
            values["rope.scaling.yarn_beta_slow"] = scaling.beta_slow
            if scaling.attention_factor is not None:
                values["rope.scaling.attn_factor"] = scaling.attention_factor / (0.1 * math.log(scaling.factor) + 1)
    metadata = {f"{config.architecture}.{key}": value for key, value in values.items()}
    return {"general.architecture": config.architecture, **metadata}

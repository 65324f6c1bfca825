"""Limits for the numbers of a model's files. They are far above any real model; larger numbers mean a damaged file."""

from __future__ import annotations

from pathlib import Path

from unspool.config import ModelConfig
from unspool.errors import ModelError

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_HEADS = 4096
MAX_EXPERTS = 1 << 14
MAX_HEAD_DIM = 2048
MAX_VOCABULARY = 1 << 22
MAX_CONTEXT = 1 << 24
MAX_THETA = 1e12


def even_share(hidden: int, heads: int) -> int | None:
    """The head dimension of a model whose file omits it; None if the heads do not divide the width."""
    return None if hidden % heads else hidden // heads


def every_nth_is_global(pattern: int, num_layers: int) -> tuple[bool, ...]:
    """Which layers have the sliding window, if every `pattern`-th layer sees all keys."""
    return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))


def check_config(source: Path, config: ModelConfig) -> ModelConfig:
    """Check the relations between a config's numbers, for any kind of file."""

    def refuse(message: str) -> None:
        raise ModelError(f"{source}: {message}")

    if config.num_heads % config.num_kv_heads:
        refuse(f"{config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads evenly")
    if config.head_dim < 1 or config.head_dim % 2:
        refuse(f"the head dimension is {config.head_dim}; it must be even")
    if config.rope_dim > config.head_dim or config.rope_dim % 2:
        refuse(f"{config.rope_dim} channels of each head are rotated; it must be even and at most {config.head_dim}")
    if config.vocab_size > MAX_VOCABULARY:
        refuse(f"the vocabulary has {config.vocab_size} tokens; at most {MAX_VOCABULARY} are allowed")
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        refuse(
            f"rope scaling's high_freq_factor {scaling.high_freq_factor:g} must exceed "
            f"its low_freq_factor {scaling.low_freq_factor:g}"
        )
    if scaling is not None and scaling.kind == "yarn" and scaling.factor < 1:
        refuse(f"rope scaling 'yarn' has the factor {scaling.factor:g}; it must be at least 1")
    return config

"""Gemma 2: Gemma 3 without norms of q and k, with soft-capped scores and logits; every second layer is global."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.models import gguf_keys, hf_keys
from unspool.models.gemma3 import HEAD_DIM, Gemma3, Gemma3Config, check_scale
from unspool.models.layers import Attention
from unspool.models.limits import MAX_CONTEXT, every_nth_is_global
from unspool.models.rotary import Rotary
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile

PATTERN = 2
WINDOW = 4096
SCORE_CAP, LOGIT_CAP = 50.0, 30.0
LAYERS_27B = 46  # the one size whose attention scale is not 1 / sqrt(head_dim)


class Gemma2(Gemma3):
    shapes = {
        "tiny-gemma2": Gemma3Config(
            **vars(Gemma3.shapes["tiny-gemma3"])
            | {"architecture": "gemma2", "rope_theta": 10_000.0, "sliding_layers": every_nth_is_global(PATTERN, 4)}
            | {"attention_softcap": SCORE_CAP, "logit_softcap": LOGIT_CAP}
        )
    }

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        common = gguf_keys.common(keys, file)
        width = common["hidden_size"] // common["num_heads"]
        has_own_scale = common["num_layers"] == LAYERS_27B and width != common["head_dim"]
        own = {
            "activation": "gelu_tanh",
            "sliding_window": common["sliding_window"] or WINDOW,
            "sliding_layers": gguf_keys.sliding_layers(keys, common["num_layers"], PATTERN),
        }
        return Gemma3Config(
            **common | own,
            attention_scale=1 / math.sqrt(width) if has_own_scale else None,
            attention_softcap=keys.number("attn_logit_softcapping", SCORE_CAP, low=0, high=1e6),
            logit_softcap=keys.number("final_logit_softcapping", LOGIT_CAP, low=0, high=1e6),
        )

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, Gemma3Config)
        width = config.hidden_size // config.num_heads if config.num_layers == LAYERS_27B else config.head_dim
        check_scale(config, width)
        caps = {"attn_logit_softcapping": config.attention_softcap, "final_logit_softcapping": config.logit_softcap}
        return gguf_keys.common_keys(config) | {key: cap for key, cap in caps.items() if cap is not None}

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        common = hf_keys.common(
            fields, name, head_dim=HEAD_DIM, tied_embeddings=True, activation="gelu_pytorch_tanh"
        )
        scalar = fields.number("query_pre_attn_scalar", 256.0, low=0, high=1e6)
        layers = hf_keys.sliding_layers(fields, common["num_layers"])
        return Gemma3Config(
            **common,
            sliding_window=fields.integer("sliding_window", WINDOW, high=MAX_CONTEXT),
            sliding_layers=layers or every_nth_is_global(PATTERN, common["num_layers"]),
            attention_scale=None if scalar == common["head_dim"] else 1 / math.sqrt(scalar),
            attention_softcap=fields.optional_number("attn_logit_softcapping", low=0, high=1e6),
            logit_softcap=fields.optional_number("final_logit_softcapping", low=0, high=1e6),
        )

    def attention(self, config: ModelConfig, index: int) -> Attention:
        return replace(super().attention(config, index), qk_norm=None)

    def rotary(self, config: ModelConfig, index: int) -> Rotary:
        return Rotary(config.rope_dim, config.rope_theta, config.rope_style, config.rope_scaling)


FAMILY = Gemma2()

"""Gemma 3n: Gemma 4's attention with heads of one size, in a stream of several parts (altup.py), with per-layer inputs
of each token, and first layers in which a threshold removes most gates.

Hugging Face and GGUF store norms the same way.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from unspool.config import ModelConfig
from unspool.lazy import np
from unspool.models import gguf_keys, hf_keys
from unspool.models.altup import AltUp, AltUpLayer, CutGlu, Laurel
from unspool.models.gemma4 import Gemma4, Gemma4Config
from unspool.models.layers import Architecture, FeedForward, Glu, Layer, RmsNorm, TokenInput, TokenInputs
from unspool.models.limits import (
    MAX_CONTEXT,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_THETA,
    MAX_VOCABULARY,
    MAX_WIDTH,
    every_nth_is_global,
)
from unspool.models.qwen2 import TINY_QWEN2
from unspool.models.rotary import Rotary
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight, encode_weight

PATTERN = 5  # four sliding layers, then a global one
THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
MAX_PARTS = 64
SPARSE_LAYERS, SPARSITY = 10, 0.95  # the first layers, and the share of their gates that the threshold removes
TABLE = "per_layer_token_embd.weight"
# Matrices that Hugging Face's files store one by one, and GGUF in one tensor.
PROJECTIONS = {
    "model.altup_projections.": "altup_proj.",
    "model.altup_unembed_projections.": "altup_unembd_proj.",
}


@record(frozen=True)
class Gemma3nConfig(Gemma4Config):
    num_parts: int = 4  # of the stream
    active_part: int = 0
    laurel_rank: int = 64
    widths: tuple[int, ...] = ()  # of each layer's feed-forward
    cutoffs: tuple[float | None, ...] = ()  # in deviations above the mean; None: no threshold
    token_rows: int | None = None  # rows of the table of per-layer inputs; None: one per token


GEMMA3N_E2B = Gemma3nConfig(
    architecture="gemma3n",
    num_layers=30,
    hidden_size=2048,
    num_heads=8,
    num_kv_heads=2,
    head_dim=256,
    intermediate_size=8192,
    vocab_size=262_400,
    context_length=32_768,
    norm_eps=1e-6,
    rope_dim=256,
    rope_theta=THETA,
    tied_embeddings=True,
    activation="gelu_tanh",
    sliding_window=512,
    sliding_layers=every_nth_is_global(PATTERN, 30),
    global_head_dim=256,
    global_kv_heads=2,
    shared_layers=10,
    token_width=256,
    logit_softcap=30.0,
    widths=(8192,) * 30,
    cutoffs=(NormalDist().inv_cdf(SPARSITY),) * SPARSE_LAYERS + (None,) * 20,
    token_rows=262_144,
)
TINY_GEMMA3N = Gemma3nConfig(
    **vars(TINY_QWEN2)
    | {"architecture": "gemma3n", "activation": "gelu_tanh", "num_layers": 6, "num_kv_heads": 1, "qkv_bias": False}
    | {"rope_theta": THETA, "sliding_window": 24, "sliding_layers": every_nth_is_global(2, 6), "tied_embeddings": True},
    global_head_dim=TINY_QWEN2.head_dim,
    global_kv_heads=1,
    shared_layers=2,
    token_width=32,
    logit_softcap=30.0,
    num_parts=3,
    laurel_rank=32,
    widths=(TINY_QWEN2.intermediate_size,) * 6,
    cutoffs=(0.5, 1.0, None, None, None, None),
)


class Gemma3n(Gemma4):
    shapes = {"gemma3n-e2b": GEMMA3N_E2B, "tiny-gemma3n": TINY_GEMMA3N}
    whole_names = Gemma4.whole_names
    layer_names = {
        **Gemma4.layer_names,
        "altup.correct_output_scale": "altup_correct_scale.weight",
        "altup.correction_coefs.weight": "altup_correct_coef.weight",
        "altup.prediction_coefs.weight": "altup_predict_coef.weight",
        "altup.modality_router.weight": "altup_router.weight",
        "altup.router_norm.weight": "altup_router_norm.weight",
        "laurel.linear_left.weight": "laurel_l.weight",
        "laurel.linear_right.weight": "laurel_r.weight",
        "laurel.post_laurel_norm.weight": "laurel_post_norm.weight",
    }

    # Reading ---------------------------------------------------------------------------------------------------------
    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
        widths = _widths(fields, "intermediate_size", layers)
        fields = Fields(fields.source, {**fields.values, f"{fields.prefix}intermediate_size": widths[0]}, fields.prefix)
        if not fields.boolean("altup_correct_scale", True):
            fields.fail("altup_correct_scale", "only true is supported")
        common = hf_keys.common(
            fields, name, theta=THETA, head_dim=256, tied_embeddings=True, activation="gelu_pytorch_tanh"
        )
        local, scaling = hf_keys.local_rope(fields, common["rope_dim"])
        if scaling is not None:
            fields.fail("rope_parameters.sliding_attention.rope_type", "scaling of sliding layers is not supported")
        parts = fields.integer("altup_num_inputs", 4, low=2, high=MAX_PARTS)
        config = Gemma3nConfig(
            **common,
            sliding_window=fields.integer("sliding_window", 512, high=MAX_CONTEXT),
            sliding_layers=hf_keys.sliding_layers(fields, layers) or every_nth_is_global(PATTERN, layers),
            rope_theta_local=local or LOCAL_THETA,
            shared_layers=fields.integer("num_kv_shared_layers", 15, low=0, high=layers - 1),
            token_width=fields.integer("hidden_size_per_layer_input", 256, high=MAX_WIDTH),
            token_rows=fields.integer("vocab_size_per_layer_input", 262_144, high=MAX_VOCABULARY),
            logit_softcap=fields.optional_number("final_logit_softcapping", low=0, high=1e6),
            num_parts=parts,
            active_part=fields.integer("altup_active_idx", 0, low=0, high=parts - 1),
            laurel_rank=fields.integer("laurel_rank", 64, high=MAX_WIDTH),
            widths=widths,
            cutoffs=_cutoffs_from_hf(fields, layers),
            global_head_dim=common["head_dim"],
            global_kv_heads=common["num_kv_heads"],
        )
        return self._checked(fields, config)

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        layers = keys.integer("block_count", high=MAX_LAYERS)
        widths = _widths(keys, "feed_forward_length", layers)
        single = Fields(keys.source, {**keys.values, f"{keys.prefix}feed_forward_length": widths[0]}, keys.prefix)
        common = gguf_keys.common(single, file, theta=THETA)
        if common["sliding_window"] is None:
            keys.fail("attention.sliding_window", "it is missing")
        common["sliding_layers"] = gguf_keys.sliding_layers(keys, layers, PATTERN)
        parts = keys.integer("altup.num_inputs", low=2, high=MAX_PARTS)
        table, laurel = file.tensors.get(TABLE), file.tensors.get("blk.0.laurel_l.weight")
        config = Gemma3nConfig(
            **common | {"activation": self.gguf_activation},
            rope_theta_local=keys.number("rope.freq_base_swa", LOCAL_THETA, low=1, high=MAX_THETA),
            shared_layers=keys.integer("attention.shared_kv_layers", low=0, high=layers - 1),
            token_width=keys.integer("embedding_length_per_layer_input", high=MAX_WIDTH),
            token_rows=None if table is None or table.shape[0] == common["vocab_size"] else table.shape[0],
            logit_softcap=keys.number("final_logit_softcapping", 30.0, low=0, high=1e6),
            num_parts=parts,
            active_part=keys.integer("altup.active_idx", low=0, high=parts - 1),
            laurel_rank=64 if laurel is None else laurel.shape[0],
            widths=widths,
            cutoffs=_cutoffs_from_gguf(keys, layers),
            global_head_dim=common["head_dim"],
            global_kv_heads=common["num_kv_heads"],
        )
        return self._checked(keys, config)

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, Gemma3nConfig)
        values = gguf_keys.common_keys(config) | {
            "attention.shared_kv_layers": config.shared_layers,
            "embedding_length_per_layer_input": config.token_width,
            "feed_forward_length": list(config.widths),
            "rope.freq_base_swa": config.rope_theta_local,
            "altup.num_inputs": config.num_parts,
            "altup.active_idx": config.active_part,
            "activation_sparsity_scale": [-math.inf if each is None else each for each in config.cutoffs],
        }
        return values | ({} if config.logit_softcap is None else {"final_logit_softcapping": config.logit_softcap})

    def gguf_tensors(self, config: ModelConfig) -> dict[str, Any]:
        return gguf_keys.rope_tensors(config)

    def canonical_name(self, name: str, config: ModelConfig) -> str | None:
        for stored, canonical in PROJECTIONS.items():
            if name.startswith(stored):
                return name.replace(stored, canonical)
        return super().canonical_name(name, config)

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        found = super().canonical_weights(name, weight, config)
        return [_clipped(each) if each.name.endswith("altup_correct_coef.weight") else each for each in found]

    # Layers ----------------------------------------------------------------------------------------------------------
    def architecture(self, config: ModelConfig) -> Architecture:
        assert isinstance(config, Gemma3nConfig)
        return replace(
            super().architecture(config),
            token_inputs=TokenInputs(config.token_width, config.token_rows),
            streams=self._streams(config),
        )

    def layer(self, config: ModelConfig, index: int) -> Layer:
        assert isinstance(config, Gemma3nConfig)
        norm = RmsNorm(config.norm_eps)
        return AltUpLayer(
            self.attention(config, index),
            self.feed_forward(config, index),
            norm=norm,
            post_norm=norm,
            ffn_norm=norm,
            ffn_post_norm=norm,
            token_input=TokenInput(config.token_width, config.activation, norm),
            streams=self._streams(config),
            laurel=Laurel(config.laurel_rank, norm),
        )

    def _streams(self, config: Gemma3nConfig) -> AltUp:
        return AltUp(config.num_parts, config.active_part, RmsNorm(config.norm_eps))

    def rotary(self, config: ModelConfig, index: int) -> Rotary:
        assert isinstance(config, Gemma3nConfig)
        if config.is_global(index):
            return Rotary(config.rope_dim, config.rope_theta, config.rope_style, config.rope_scaling)
        return Rotary(config.rope_dim, config.rope_theta_local, config.rope_style)

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        assert isinstance(config, Gemma3nConfig)
        cutoff, width = config.cutoffs[index], config.widths[index]
        return Glu(width, config.activation) if cutoff is None else CutGlu(width, config.activation, cutoff)


def _widths(fields: Fields, key: str, layers: int) -> tuple[int, ...]:
    return tuple(gguf_keys.numbers_of_layers(fields, key, layers, MAX_INTERMEDIATE))


def _cutoffs_from_hf(fields: Fields, layers: int) -> tuple[float | None, ...]:
    """The thresholds, from the shares of gates that are removed, for normally distributed gates."""
    if fields.get("activation_sparsity_pattern") is None:
        sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
        shares = (SPARSITY,) * sparse + (0.0,) * (layers - sparse)
    else:
        shares = fields.numbers("activation_sparsity_pattern", layers, low=-1e-9, high=1 - 1e-6)
    return tuple(NormalDist().inv_cdf(each) if each > 0 else None for each in shares)


def _cutoffs_from_gguf(keys: Fields, layers: int) -> tuple[float | None, ...]:
    key = "activation_sparsity_scale"
    value = keys.get(key)
    if not isinstance(value, list) or len(value) != layers or any(type(each) is not float for each in value):
        keys.fail(key, f"a list of {layers} numbers was expected")
    if any(math.isnan(each) or each > 10 for each in value):
        keys.fail(key, "a number of standard deviations was expected, at most 10")
    return tuple(each if math.isfinite(each) else None for each in value)


def _clipped(weight: Weight) -> Weight:
    """Limit the values to 120, as Hugging Face's models do."""
    return encode_weight(weight.name, np.clip(weight.dequantize(), -120, 120))


FAMILY = Gemma3n()

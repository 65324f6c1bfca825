"""Qwen: biases on q, k and v in the second generation, norms on q and k in the third."""

from __future__ import annotations

from unspool.models.blocks import Decoder


class Qwen2(Decoder):
    qkv_bias = True


class Qwen3(Decoder):
    qk_norm = True

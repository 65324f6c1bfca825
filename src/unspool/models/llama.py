"""Llama, SmolLM and Mistral: the plain decoder. Mistral's sliding window, where it has one, is in its config."""

from __future__ import annotations

from unspool.models.blocks import Decoder


class Llama(Decoder):
    pass

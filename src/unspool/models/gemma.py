"""Gemma 3: norms before and after each block, q and k normed, five sliding layers for each global one.

Its scaled embedding, tanh GELU, window pattern and second rope base are numbers in the config.
"""

from __future__ import annotations

from unspool.models.blocks import Decoder


class Gemma3(Decoder):
    qk_norm = True
    post_norms = True

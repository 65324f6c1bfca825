"""Mistral 4: latent attention with queries scaled by their position; experts in groups, chosen by a softmax."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.deepseek_v3 import TINY_LATENT, DeepseekV3


class Mistral4(DeepseekV3):
    shapes = {
        "tiny-mistral4": replace(
            TINY_LATENT, architecture="mistral4", scoring="softmax", growth=0.125, num_groups=1, num_used_groups=1
        )
    }
    scoring = "softmax"

    @property
    def name(self) -> str:
        return "mistral4"


FAMILY = Mistral4()

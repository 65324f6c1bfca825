"""DeepSeek V2 and its Lite: latent attention, experts chosen by a softmax over all of them.

Its GGUF files are read by deepseek_v3.py, for they have the same name and tell the difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.models.deepseek_v3 import TINY_LATENT, DeepseekV3
from unspool.models.glm4_moe import sigmoid_experts_from_hf
from unspool.weights.fields import Fields


class DeepseekV2(DeepseekV3):
    shapes = {
        "tiny-deepseek-v2": replace(
            TINY_LATENT,
            architecture="deepseek_v2",
            query_dim=None,
            scoring="softmax",
            group_top=1,
            normalized=False,
            rope_scaling=None,
            score_log=0.0,
        )
    }
    scoring = "softmax"
    group_top = 1

    def experts_from_hf(self, fields: Fields, num_layers: int) -> dict[str, Any]:
        method = fields.string("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            fields.fail("topk_method", f"{method[:60]!r} is not supported; greedy and group_limited_greedy are")
        if fields.boolean("norm_topk_prob", False):
            fields.fail("norm_topk_prob", "weights that are normalized are not supported")
        found = sigmoid_experts_from_hf(fields, num_layers) | {"normalized": False}
        return found if method == "group_limited_greedy" else found | {"num_groups": 1, "num_used_groups": 1}


FAMILY = DeepseekV2()

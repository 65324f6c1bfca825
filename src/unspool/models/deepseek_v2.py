"""DeepSeek V2 and its Lite: latent attention, experts chosen by a softmax over all of them.

deepseek_v3.py reads its GGUF files, because they use the same architecture name; a key distinguishes the two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.models.deepseek_v3 import TINY_LATENT, DeepseekV3
from unspool.models.glm4_moe import sigmoid_experts_from_hf
from unspool.weights.fields import Fields

DEEPSEEK_V2_LITE = replace(
    TINY_LATENT, architecture="deepseek_v2", num_layers=27, hidden_size=2048, num_heads=16, num_kv_heads=16,
    head_dim=192, rope_dim=64, intermediate_size=10_944, vocab_size=102_400, context_length=163_840, rope_scaling=None,
    num_experts=64, num_used_experts=6, expert_width=1408, shared_width=2816, dense_layers=(0,), normalized=False,
    scoring="softmax", group_top=1, num_groups=1, num_used_groups=1, routed_scale=1.0, latent_dim=512, value_dim=128,
    query_dim=None, score_log=0.0,
)  # fmt: skip


class DeepseekV2(DeepseekV3):
    shapes = {
        "deepseek-v2-lite": DEEPSEEK_V2_LITE,
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

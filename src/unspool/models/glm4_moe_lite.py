"""GLM 4.7 Flash: DeepSeek V3's layers; a list names the layers without experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.models.deepseek_v3 import TINY_LATENT, DeepseekV3
from unspool.models.glm4_moe import sigmoid_experts_from_hf
from unspool.weights.fields import Fields


class Glm4MoeLite(DeepseekV3):
    shapes = {
        "tiny-glm4-moe-lite": replace(
            TINY_LATENT,
            architecture="glm4_moe_lite",
            num_groups=1,
            num_used_groups=1,
            rope_scaling=None,
            score_log=0.0,
        )
    }

    def experts_from_hf(self, fields: Fields, num_layers: int) -> dict[str, Any]:
        found, kinds = sigmoid_experts_from_hf(fields, num_layers), fields.get("mlp_layer_types")
        if kinds is None:
            first = fields.integer("first_k_dense_replace", 1, low=0, high=num_layers)
            return found | {"dense_layers": tuple(range(first))}
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(k not in ("dense", "sparse") for k in kinds):
            fields.fail("mlp_layer_types", f"a list of {num_layers} times dense or sparse was expected")
        dense = tuple(index for index, kind in enumerate(kinds) if kind == "dense")
        if dense != tuple(range(len(dense))):
            fields.fail("mlp_layer_types", "layers without experts are supported at the beginning only")
        return found | {"dense_layers": dense}


FAMILY = Glm4MoeLite()

"""Qwen 3 Next: Qwen 3.5 with experts; files store the delta nets' projections key head by key head."""

from __future__ import annotations

from dataclasses import replace

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.lazy import np
from unspool.models.qwen3_5 import DeltaConfig
from unspool.models.qwen3_5_moe import QWEN3_5_35B_A3B, TINY_QWEN3_5_MOE, Qwen35Moe
from unspool.weights.weight import Weight

ALL = "linear_attn.in_proj_qkvz.weight"


class Qwen3Next(Qwen35Moe):
    gguf_tiled = False
    joint_gates = True
    shapes = {
        "qwen3-next-80b-a3b": replace(
            QWEN3_5_35B_A3B, architecture="qwen3_next", num_layers=48, vocab_size=151_936, tiled=False,
            attention_layers=tuple((layer + 1) % 4 == 0 for layer in range(48)), num_experts=512, num_used_experts=10,
        ),
        "tiny-qwen3-next": replace(TINY_QWEN3_5_MOE, architecture="qwen3_next", tiled=False),
    }  # fmt: skip
    layer_names = {
        **{name: ours for name, ours in Qwen35Moe.layer_names.items() if ".in_proj_" not in name},
        ALL: "attn_qkv.weight",
        "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    }

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        assert isinstance(config, DeltaConfig)
        found = super().canonical_weights(name, weight, config)
        return [part for each in found for part in _split(each, config)] if name.endswith(ALL) else found


def _split(weight: Weight, config: DeltaConfig) -> list[Weight]:
    """Split the rows, which are stored key head by key head, into the projection of q, k and v and that of z."""
    key, group = config.delta_key_dim, config.delta_heads // config.delta_key_heads * config.delta_value_dim
    wanted = (config.delta_key_heads * 2 * (key + group), config.hidden_size)
    if weight.shape != wanted:
        raise ModelError(f"tensor {weight.name} has shape {list(weight.shape)}; {list(wanted)} was expected")
    heads = weight.data.reshape(config.delta_key_heads, 2 * (key + group), -1)
    ends = np.cumsum([key, key, group, group])
    q, k, v, z = (part.reshape(-1, heads.shape[-1]) for part in np.split(heads, ends[:-1], axis=1))

    def rows(name: str, *parts: np.ndarray) -> Weight:
        data = np.concatenate(parts)
        return Weight(name, weight.format, (len(data), config.hidden_size), data.reshape(-1).data)

    return [rows(weight.name, q, k, v), rows(weight.name.replace("attn_qkv", "attn_gate"), z)]


FAMILY = Qwen3Next()

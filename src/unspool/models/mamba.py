"""Shared by families with Mamba-2 layers: their numbers, their tensors' names, and conversions between file formats."""

from __future__ import annotations

import math
from typing import Any

from unspool.config import ModelConfig
from unspool.lazy import np
from unspool.models import hybrid
from unspool.models.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH
from unspool.models.recurrent import Mamba2
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight, encode_weight

MAX_TAPS = 64


@record(frozen=True)
class MambaConfig(ModelConfig):
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    mamba_state_dim: int = 0
    mamba_groups: int = 1
    taps: int = 4  # of the convolutions
    conv_bias: bool = True


def names(prefix: str) -> dict[str, str]:
    """GGUF's names of a Mamba-2 layer's tensors, by Hugging Face's names."""
    return {
        f"{prefix}in_proj.weight": "ssm_in.weight",
        f"{prefix}conv1d.weight": "ssm_conv1d.weight",
        f"{prefix}conv1d.bias": "ssm_conv1d.bias",
        f"{prefix}dt_bias": "ssm_dt.bias",
        f"{prefix}A_log": "ssm_a",
        f"{prefix}D": "ssm_d",
        f"{prefix}norm.weight": "ssm_norm.weight",
        f"{prefix}out_proj.weight": "ssm_out.weight",
    }


def from_hf(fields: Fields, keys: dict[str, str], heads: int) -> dict[str, Any]:
    """The fields that MambaConfig adds. `keys` has the family's names of head_dim, state_dim, groups, taps and
    conv_bias."""
    if fields.boolean("mamba_proj_bias", False):
        fields.fail("mamba_proj_bias", "Mamba layers with biases of their projections are not supported")
    limit = fields.get("time_step_limit")
    if limit is not None and not _limits_nothing(limit):
        fields.fail("time_step_limit", "limits of time steps are not supported")
    return {
        "mamba_heads": heads,
        "mamba_head_dim": fields.integer(keys["head_dim"], high=MAX_HEAD_DIM),
        "mamba_state_dim": fields.integer(keys["state_dim"], high=MAX_HEAD_DIM),
        "mamba_groups": shared(fields, keys["groups"], fields.integer(keys["groups"], 1, high=MAX_HEADS), heads),
        "taps": fields.integer(keys["taps"], 4, low=2, high=MAX_TAPS),
        "conv_bias": fields.boolean(keys["conv_bias"], True),
    }


def _limits_nothing(limit: Any) -> bool:
    """Whether limits on time steps have no effect. Time steps are always positive, so a lower limit of 0 has none. JSON
    has no infinity."""
    if not isinstance(limit, list) or len(limit) != 2 or type(limit[0]) not in (int, float):
        return False
    return bool(limit[0] <= 0) and limit[1] in (math.inf, {"__float__": "Infinity"})


def shared(fields: Fields, key: str, groups: int, heads: int) -> int:
    if heads % groups:
        fields.fail(key, f"{heads} heads cannot share {groups} groups evenly")
    return groups


def from_gguf(keys: Fields, file: GGUFFile) -> dict[str, Any]:
    """The fields that MambaConfig adds."""
    heads = keys.integer("ssm.time_step_rank", high=MAX_HEADS)
    inner = keys.integer("ssm.inner_size", high=MAX_WIDTH)
    if inner % heads:
        keys.fail("ssm.inner_size", f"{inner} channels cannot be shared among {heads} heads evenly")
    return {
        "mamba_heads": heads,
        "mamba_head_dim": inner // heads,
        "mamba_state_dim": keys.integer("ssm.state_size", high=MAX_HEAD_DIM),
        "mamba_groups": shared(keys, "ssm.group_count", keys.integer("ssm.group_count", high=MAX_HEADS), heads),
        "taps": keys.integer("ssm.conv_kernel", low=2, high=MAX_TAPS),
        "conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
    }


def gguf_keys(config: MambaConfig) -> dict[str, Any]:
    """The keys that `from_gguf` reads back."""
    return {
        "ssm.conv_kernel": config.taps,
        "ssm.inner_size": config.mamba_heads * config.mamba_head_dim,
        "ssm.state_size": config.mamba_state_dim,
        "ssm.time_step_rank": config.mamba_heads,
        "ssm.group_count": config.mamba_groups,
    }


def mixer(config: MambaConfig) -> Mamba2:
    return Mamba2(
        num_heads=config.mamba_heads,
        head_dim=config.mamba_head_dim,
        state_dim=config.mamba_state_dim,
        num_groups=config.mamba_groups,
        taps=config.taps,
        norm_eps=config.norm_eps,
        norm_groups=config.mamba_groups,
        conv_bias=config.conv_bias,
    )


def by_gguf(weight: Weight, config: MambaConfig) -> Weight:
    """Convert a tensor to GGUF's convention: decay rates instead of their logarithms, and vectors as matrices."""
    name, heads, groups = weight.name, config.mamba_heads, config.mamba_groups
    if name.endswith(".ssm_a"):
        return encode_weight(name, -np.exp(weight.dequantize()).reshape(heads, 1))
    if name.endswith(".ssm_d") and weight.shape == (heads,):
        return Weight(name, weight.format, (heads, 1), weight.raw)
    if name.endswith(".ssm_norm.weight") and len(weight.shape) == 1 and weight.shape[0] % groups == 0:
        return Weight(name, weight.format, (groups, weight.shape[0] // groups), weight.raw)
    return hybrid.squeezed(weight)

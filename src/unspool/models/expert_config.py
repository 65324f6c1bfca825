"""The numbers of models with experts, and readers for them that their families share."""

from __future__ import annotations

from typing import Any

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.lazy import np
from unspool.models.limits import MAX_EXPERTS, MAX_INTERMEDIATE
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.weight import Weight, encode_weight


@record(frozen=True)
class ExpertConfig(ModelConfig):
    """A model in which some layers have experts."""

    num_experts: int = 0
    num_used_experts: int = 0  # per row
    expert_width: int = 0
    normalized: bool = True  # the weights of a row's experts are scaled to sum to 1
    dense_layers: tuple[int, ...] = ()  # layers that have a feed-forward of `intermediate_size` in place of experts
    shared_width: int = 0  # width of the expert that every row uses; 0: there is none


def from_hf(fields: Fields, num_layers: int, *, width: str = "moe_intermediate_size") -> dict[str, Any]:
    """The fields that ExpertConfig adds; `width` names the field with an expert's width."""
    step = fields.integer("decoder_sparse_step", 1, high=num_layers)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(each) is not int for each in dense):
        fields.fail("mlp_only_layers", "a list of the numbers of layers was expected")
    count = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    experts = fields.integer(count, high=MAX_EXPERTS)
    return {
        "num_experts": experts,
        "num_used_experts": fields.integer("num_experts_per_tok", high=experts),
        "expert_width": fields.integer(width, high=MAX_INTERMEDIATE),
        "dense_layers": tuple(each for each in range(num_layers) if each in dense or (each + 1) % step),
    }


def from_gguf(keys: Fields) -> dict[str, Any]:
    """The fields that ExpertConfig adds, from the keys that all GGUF files use."""
    experts = keys.integer("expert_count", high=MAX_EXPERTS)
    width = keys.integer("feed_forward_length", high=MAX_INTERMEDIATE)
    return {
        "num_experts": experts,
        "num_used_experts": keys.integer("expert_used_count", high=experts),
        "expert_width": keys.integer("expert_feed_forward_length", width, high=MAX_INTERMEDIATE),
    }


def gguf_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys that `from_gguf` reads back."""
    assert isinstance(config, ExpertConfig)
    if config.dense_layers:
        raise ModelError(f"GGUF files of {config.architecture} cannot store which layers have no experts")
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_used_experts,
        "expert_feed_forward_length": config.expert_width,
    }


def split_experts(stack: Weight, config: ExpertConfig, *, may_be_transposed: bool = True) -> list[Weight]:
    """Split a tensor of all experts of a layer as GGUF stores it: gates stacked with up projections become two tensors.

    Hugging Face names it NAME.gate_up_proj or NAME.down_proj. Its shape is [expert, out, in] or, if it may be
    transposed, [expert, in, out].
    """
    is_down = "down" in stack.name
    out, into = (config.hidden_size, config.expert_width) if is_down else (2 * config.expert_width, config.hidden_size)
    count = config.num_experts
    if may_be_transposed and stack.shape == (count, into, out):
        stack = encode_weight(stack.name, np.ascontiguousarray(stack.dequantize().swapaxes(1, 2)), stack.format)
    if stack.shape != (count, out, into):
        raise ModelError(f"tensor {stack.name} has shape {list(stack.shape)}; {[count, out, into]} was expected")
    if is_down:
        return [stack]
    halves = stack.data.reshape(count, 2, -1)
    return [
        Weight(
            stack.name.replace("gate_up", part),
            stack.format,
            (count, out // 2, into),
            np.ascontiguousarray(halves[:, index]).reshape(-1).data,
        )
        for index, part in enumerate(("gate", "up"))
    ]

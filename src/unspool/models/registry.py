"""Which class runs which architecture."""

from __future__ import annotations

from collections.abc import Mapping

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.models.blocks import Decoder
from unspool.models.gemma import Gemma3
from unspool.models.llama import Llama
from unspool.models.qwen import Qwen2, Qwen3
from unspool.ops import Ops
from unspool.weights.weight import Weight

ARCHITECTURES: dict[str, type[Decoder]] = {
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma3": Gemma3,
}


def build(config: ModelConfig, weights: Mapping[str, Weight], ops: Ops) -> Decoder:
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"architecture {config.architecture!r} is not supported; supported: {known}")
    return ARCHITECTURES[config.architecture](config, weights, ops)

"""Converts a model's weights to another format. Vectors, and matrices whose rows are not whole blocks, are
unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unspool.errors import ModelError
from unspool.models.checkpoint import Checkpoint
from unspool.weights.formats import FORMATS
from unspool.weights.weight import Weight, encode_weight

# The format that 16-bit and 32-bit weights are converted to on loading.
LOADED_AS = {"fp8": "fp8", "int8": "q8_0", "int4": "q4_1"}
WIDE = ("f32", "f16", "bf16")


def quantize_weight(weight: Weight, format: str) -> Weight:
    """The same values, rounded to `format`."""
    if format not in FORMATS:
        raise ModelError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    return weight if weight.format == format else encode_weight(weight.name, weight.dequantize(), format)


def loaded_as(checkpoint: Checkpoint, kind: str) -> Checkpoint:
    """A checkpoint with EngineConfig.quantize applied; weights that its file stores in fewer bits stay unchanged."""
    if kind == "none":
        return checkpoint
    format = LOADED_AS[kind]

    def smaller(weights: Mapping[str, Weight]) -> dict[str, Weight]:
        wide = {name: weight for name, weight in weights.items() if weight.format in WIDE}
        return {**weights, **_matrices_in(wide, format)}

    draft_weights = checkpoint.draft_weights
    return replace(
        checkpoint,
        weights=smaller(checkpoint.weights),
        draft_weights=lambda: smaller(draft_weights()),
        name=f"{checkpoint.name}-{kind}",
    )


def quantize(checkpoint: Checkpoint, format: str) -> Checkpoint:
    """A checkpoint in memory in which every matrix whose rows are whole blocks has the given format."""
    if format not in FORMATS:
        raise ModelError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    return replace(checkpoint, weights=_matrices_in(checkpoint.weights, format), name=f"{checkpoint.name}-{format}")


def _matrices_in(weights: Mapping[str, Weight], format: str) -> dict[str, Weight]:
    block = FORMATS[format].block
    return {
        name: quantize_weight(weight, format) if len(weight.shape) > 1 and weight.shape[-1] % block == 0 else weight
        for name, weight in weights.items()
    }

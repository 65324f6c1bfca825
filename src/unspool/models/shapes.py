"""Configs without weights: real models for benchmarks, and tiny models of every family for tests."""

from __future__ import annotations

from unspool.config import ModelConfig
from unspool.models.registry import FAMILIES, family_of

SHAPES: dict[str, ModelConfig] = {
    name: config for family in FAMILIES for name, config in family_of(family).shapes.items()
}
TINY = SHAPES["tiny"]
# The first tiny model of each family, for tests of all families.
EVERY_FAMILY = tuple(
    next(name for name in family_of(family).shapes if name.startswith("tiny")) for family in FAMILIES
)

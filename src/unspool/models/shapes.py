"""Models by their shape alone: the real ones that benchmarks time, and tiny ones that tests run, of every family."""

from __future__ import annotations

from unspool.config import ModelConfig
from unspool.models.registry import FAMILIES, family_of

SHAPES: dict[str, ModelConfig] = {
    name: config for family in FAMILIES for name, config in family_of(family).shapes.items()
}
TINY = SHAPES["tiny"]
# The first tiny model of each family: what tests of all families run.
EVERY_FAMILY = tuple(
    next(name for name in family_of(family).shapes if name.startswith("tiny")) for family in FAMILIES
)

"""Sampling parameters: their registry, SamplingParams, and the parameters in force for a request.

Imports neither numpy nor anything of unspool but its errors.
"""

from unspool.params.registry import MAX_SEED, fresh_seed
from unspool.params.sampling import Origin, ResolvedParams, SamplingParams
from unspool.params.values import (
    CONSTRAINT_KINDS,
    BeamParams,
    Constraint,
    ConstraintKind,
    RepetitionDetector,
    ThinkingMarks,
)

__all__ = [
    "CONSTRAINT_KINDS",
    "MAX_SEED",
    "BeamParams",
    "Constraint",
    "ConstraintKind",
    "Origin",
    "RepetitionDetector",
    "ResolvedParams",
    "SamplingParams",
    "ThinkingMarks",
    "fresh_seed",
]

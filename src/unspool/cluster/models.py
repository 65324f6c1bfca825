"""The model of a cluster, described by values: replicas load it, an ingress opens its tokenizer and template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.params import ResolvedParams, SamplingParams

if TYPE_CHECKING:
    from unspool.llm import LLM
    from unspool.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class ModelSource:
    """A model by name, path or hub id, or a shape of random weights; and the options of the engine that runs it."""

    model: str = "smollm2"
    random: str | None = None  # a shape instead of a model
    options: Mapping[str, Any] = field(default_factory=dict)  # EngineConfig's fields

    def as_dict(self) -> dict[str, Any]:
        return {"model": self.model, "random": self.random, "options": dict(self.options)}


def open_source(source: ModelSource) -> Checkpoint:
    """The model's files, opened and not loaded, with what its options override."""
    from unspool.config import EngineConfig
    from unspool.models.overridden import overridden

    return overridden(_open(source), EngineConfig(**source.options))


def _open(source: ModelSource) -> Checkpoint:
    if source.random is not None:
        from unspool.models.random import stand_in

        return stand_in(source.random)
    from unspool.models.checkpoint import open_checkpoint
    from unspool.weights.store import resolve

    return open_checkpoint(resolve(Path(source.model) if Path(source.model).exists() else source.model))


def load_model(checkpoint: Checkpoint, options: Mapping[str, Any]) -> LLM:
    from unspool.lazy import limit_blas_threads

    if options.get("device") != "reference":  # the only backend that multiplies with numpy
        limit_blas_threads()
    from unspool.llm import LLM

    return LLM(checkpoint, **options)


def resolver(checkpoint: Checkpoint, notes: tuple[str, ...]) -> Callable[[SamplingParams], ResolvedParams]:
    """What the engine of a replica would make of a request's parameters."""

    def resolve(params: SamplingParams) -> ResolvedParams:
        resolved = params.resolve(checkpoint.generation, vocab_size=checkpoint.config.vocab_size)
        return replace(resolved, warnings=(*resolved.warnings, *notes)) if notes else resolved

    return resolve

"""SamplingParams: what a request asks for; frozen, checked field by field, and aware of where each value came from.

A field left at None is unset: the model's generation config may set it, else its default holds. `resolve` returns
ResolvedParams, in which every value is concrete and `origins` says who set it. docs/sampling.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Literal

from unspool.errors import RequestError
from unspool.params import checks
from unspool.params.declared import ResolvedFields, SamplingFields
from unspool.params.registry import PARAMETERS, fresh_seed
from unspool.records import record

Origin = Literal["request", "model", "default", "drawn"]


@record(frozen=True, kw_only=True)
class SamplingParams(SamplingFields):
    """How an answer's tokens are chosen and where it ends. What is not given is the model's own default, or none.

    >>> params = SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, seed=7)
    >>> llm.generate("The sea is", params).finish_reason
    'length'
    """

    def __post_init__(self) -> None:
        for parameter in PARAMETERS:
            value = getattr(self, parameter.name)
            if value is not None:
                object.__setattr__(self, parameter.name, parameter.kind.check(parameter.name, value))
            elif parameter.is_set:
                raise checks.refuse(parameter.name, None, "a value")
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens:,} but max_tokens is {self.max_tokens:,}", "min_tokens")
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of is {self.best_of} but n is {self.n}; best_of must be at least n", "best_of")
        if self.beam is not None and self.n > self.beam.width:
            raise RequestError(f"n is {self.n} but beam.width is {self.beam.width}; a beam has width answers", "n")
        if self.beam is not None and self.best_of not in (None, self.n):
            raise RequestError("best_of draws answers and beam searches for them; give one of the two", "best_of")

    def resolve(
        self,
        generation: Mapping[str, Any],
        *,
        vocab_size: int,
        draw_seed: Callable[[], int] = fresh_seed,
    ) -> ResolvedParams:
        """Every value made concrete: the request's, else the model's generation config's, else the default."""
        from unspool.params.resolve import resolve

        return resolve(self, generation, vocab_size=vocab_size, draw_seed=draw_seed)


@record(frozen=True, kw_only=True)
class ResolvedParams(ResolvedFields):
    """Parameters in force: every value concrete, each with its origin, and warnings about combinations that cancel."""

    origins: Mapping[str, Origin] = field(repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def request(self, **changes: Any) -> SamplingParams:
        """The request for these very values, whatever defaults a model has."""
        values = {name: getattr(self, name) for name in self.origins}
        return SamplingParams(**values | changes)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """JSON-ready: {field: {"value": …, "origin": …}}."""
        from unspool.params.resolve import jsonable

        return {name: {"value": jsonable(getattr(self, name)), "origin": who} for name, who in self.origins.items()}

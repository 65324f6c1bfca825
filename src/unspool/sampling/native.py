"""The native filters, draw and logprobs: the same results as the numpy reference, faster."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from unspool.lazy import lazy, np
from unspool.params import ResolvedParams

if TYPE_CHECKING:
    from unspool.sampling import draw, filters, logprobs
    from unspool.sampling.draw import F32
    from unspool.sampling.logprobs import RowStats
else:
    draw, filters, logprobs = (lazy(f"unspool.sampling.{name}") for name in ("draw", "filters", "logprobs"))

# The stages that have a native implementation, and the number that each takes. A stage's code is its place in this
# table, which the native side receives when it is made; a stage that is not here runs in numpy.
NATIVE_STAGES: Mapping[str, Callable[[ResolvedParams], float]] = {
    "temperature": lambda params: params.temperature,
    "top_k": lambda params: params.top_k,
    "top_k_ties": lambda params: params.top_k,
    "top_p": lambda params: params.top_p,
    "min_p": lambda params: float(filters.min_p_floor(params.min_p)),
    "typical_p": lambda params: params.typical_p,
    "top_n_sigma": lambda params: params.top_n_sigma,
    "xtc": lambda params: params.xtc_threshold,
}
CODES = {stage: code for code, stage in enumerate(NATIVE_STAGES)}
HAS_NAN, HAS_INFINITY, NONE_LEFT = -1, -2, -3


@functools.cache
def native_sampling(isa: str = "auto") -> Any | None:
    """The kernels for this processor, or None where the extension was not built; the reference is used then."""
    try:
        from unspool._native import Sampling
    except ImportError:
        return None
    return Sampling(isa, list(NATIVE_STAGES))


class Tail:
    """What comes after the masks and penalties, encoded once for a sequence: temperature, filters, draw."""

    def __init__(self, native: Any, stages: tuple[str, ...], params: ResolvedParams) -> None:
        self._native = native
        self._greedy = params.greedy
        self._xtc_probability = params.xtc_probability
        self._acting = _encoded(stages, params)
        # XTC decides at each position whether it acts.
        self._resting = _encoded(tuple(stage for stage in stages if stage != "xtc"), params)
        self._has_xtc = "xtc" in stages

    def pick(self, row: Any, seed: int, position: int, want_final: bool) -> tuple[int, F32 | None]:
        """The token (or a negative answer that says why there is none) and, if wanted, the row drawn from."""
        if self._greedy:
            return self._native.greedy(row), row if want_final else None
        acts = self._has_xtc and draw.xtc_uniform(seed, position) < self._xtc_probability
        codes, values = self._acting if acts else self._resting
        final = np.empty_like(row) if want_final else None
        return self._native.choose(row, codes, values, seed, position, final), final


def describe(row: F32, token: int, count: int, native: Any | None) -> tuple[RowStats, int, list[int]]:
    """What logprobs need of a token and its row: the row's sums, the token's rank, the best tokens in order."""
    if native is None:
        return logprobs.row_stats(row), logprobs.rank_of(row, token), logprobs.top_ids(row, count)
    largest, total, rank, top = native.describe(row, token, count)
    return logprobs.RowStats(largest, total), rank, top


def _encoded(stages: tuple[str, ...], params: ResolvedParams) -> tuple[Any, Any]:
    values = [NATIVE_STAGES[stage](params) for stage in stages]
    return array("i", [CODES[stage] for stage in stages]), array("d", values)

"""What speculation needs of the engine's classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from unspool.lazy import np
    from unspool.models.decoder import Decoder
    from unspool.ops import HostRows, KVCache, Launched
    from unspool.params import ResolvedParams
    from unspool.plan import Plan, Work
    from unspool.sampling.pipeline import Sampler


class Request(Protocol):
    number: int
    tokens: list[int]
    num_prompt: int
    num_pending: int
    blocks: list[int]
    draft: list[int]

    @property
    def num_left(self) -> int: ...


class Branch(Protocol):
    """One sequence of a request that may get drafts."""

    sampler: Sampler
    speculate: str | None
    max_output: int
    output: list[int]

    @property
    def request(self) -> Request: ...


class Runner(Protocol):
    """Computes plans; where its device chooses tokens, it also launches them."""

    model: Decoder
    kv: KVCache

    @property
    def can_launch(self) -> bool: ...

    def run(self, plan: Plan) -> HostRows: ...

    def can_draw(self, params: ResolvedParams) -> bool: ...

    def add_sampler(self, number: int, sampler: Sampler) -> None: ...

    def remove_sampler(self, number: int) -> None: ...

    def launch(self, plan: Plan) -> Launched: ...


class HeadRunner(Protocol):
    """Computes rows of a head that drafts (models/draft_head.py)."""

    kv: KVCache
    width: int  # of a hidden row

    def run(self, works: Sequence[Work], given: np.ndarray) -> tuple[HostRows, np.ndarray]:
        """Logits of the wanted rows, and the rows that the head makes of all tokens; `given` are the hidden rows that
        it reads."""

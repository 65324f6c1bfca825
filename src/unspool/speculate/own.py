"""A caller's own drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import TypeVar

from unspool.drafter import BaseDrafter, Draft, DraftContext, Drafter

T = TypeVar("T")


class OwnDrafter(BaseDrafter):
    """A caller's drafter, with the engine's defaults for the rest. If it fails it is asked no more: answers do not
    depend on it."""

    name = "own"

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._has_failed = False

    def propose(self, contexts: Sequence[DraftContext], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        def proposed() -> Sequence[Sequence[int]]:
            drafts = self._drafter.propose(contexts, counts)
            if len(drafts) != len(contexts):
                raise ValueError(f"{len(drafts)} drafts for {len(contexts)} requests")
            return [draft if isinstance(draft, Draft) else list(map(index, draft)) for draft in drafts]

        return self._ask(proposed, [()] * len(contexts))

    def seconds(self, count: int) -> float:
        return self._ask(lambda: float(self._drafter.seconds(count)), 0.0)

    def forget(self, number: int) -> None:
        self._ask(lambda: self._drafter.forget(number), None)

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        if self._has_failed:
            return otherwise
        try:
            return question()
        except Exception as error:
            import logging  # takes a tenth of a start, and few starts need it

            self._has_failed = True
            logging.getLogger("unspool.engine").warning("the drafter failed; it is asked no more", exc_info=error)
            return otherwise

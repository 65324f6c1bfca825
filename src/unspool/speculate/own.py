"""A caller's own drafter."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.drafter import BaseDrafter, DraftContext, Drafter


class OwnDrafter(BaseDrafter):
    """A caller's drafter, with the engine's defaults for the rest. If it fails it is asked no more: answers do not
    depend on it."""

    name = "own"

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._has_failed = False

    def propose(self, contexts: Sequence[DraftContext], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        if not self._has_failed:
            try:
                drafts = self._drafter.propose(contexts, counts)
                if len(drafts) == len(contexts):
                    return drafts
                raise ValueError(f"{len(drafts)} drafts for {len(contexts)} requests")
            except Exception as error:
                import logging  # takes a tenth of a start, and few starts need it

                self._has_failed = True
                logging.getLogger("unspool.engine").warning("the drafter failed; it is asked no more", exc_info=error)
        return [()] * len(contexts)

    def seconds(self, count: int) -> float:
        return self._drafter.seconds(count)

    def forget(self, number: int) -> None:
        self._drafter.forget(number)

"""What one step computes, as plain values: what the scheduler decides and a runner executes."""

from __future__ import annotations

from typing import Any, NamedTuple

from unspool.records import record

PENDING = -1  # stands for a token that the device has chosen and the host has not read
NO_BLOCK = -1  # in a table: a block that was released, because no token to come sees it


class Work(NamedTuple):
    """One request's part of a step: compute `tokens` at positions `start`, `start + 1`, … into `blocks`.

    A model whose layers keep keys for different times has a table of blocks for each group of layers: `blocks` is the
    first group's, `others` are those of the other groups. A table of layers with a window has NO_BLOCK where it was.

    Its output is one of three: logits for the last `num_logits` tokens; hidden rows (after the model's last norm) for
    the last `num_hidden` tokens; or nothing. The last `num_samples` rows of logits choose tokens: none inside a prompt,
    one at the end of what is known, one more for each drafted token. (A scored prompt wants logits without choosing.)

    States of recurrent layers are those of the first `start` tokens; at position 0 they are zeros, whatever the slot
    holds.
    """

    request: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    num_logits: int
    num_samples: int
    state: int = -1  # the slot that its layers' states are in, which is written; -1: states are not kept
    saves: tuple[tuple[int, int], ...] = ()  # (offset, slot): the states after the token `tokens[offset]` go there, too
    others: tuple[tuple[int, ...], ...] = ()
    num_hidden: int = 0


@record(frozen=True)
class Plan:
    """A step. Blocks and states are copied before anything is computed, each list in its order: (source, target), and
    for a block the group of layers that it belongs to."""

    works: tuple[Work, ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    state_copies: tuple[tuple[int, int], ...] = ()

    @property
    def columns(self) -> tuple[tuple[Any, ...], ...]:
        """The fields of all works as columns, one tuple for each field: faster for code that reads all of them."""
        found: tuple[tuple[Any, ...], ...] | None = self.__dict__.get("_columns")
        if found is None:
            found = self.__dict__["_columns"] = tuple(zip(*self.works, strict=True))
        return found

    @property
    def num_tokens(self) -> int:
        return sum(len(work.tokens) for work in self.works)

    @property
    def num_prompt_rows(self) -> int:
        """Rows of requests that compute more tokens than they choose."""
        rows = 0
        for work in self.works:
            count = len(work.tokens)
            if count > work.num_samples:
                rows += count
        return rows

    @property
    def wants_hidden(self) -> bool:
        """Whether some work's output is hidden rows."""
        for work in self.works:  # noqa: SIM110 (a third of the time of any())
            if work.num_hidden:
                return True
        return False

    def __bool__(self) -> bool:
        return bool(self.works)

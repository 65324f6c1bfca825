"""A request inside the engine: tokens, how many of them are computed, and the blocks they are computed into."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from unspool.cache.blocks import chain_key

MAX_TURNS = 6  # the last ones of a prompt
Pooling = Literal["last", "mean"]  # which hidden rows of a prompt become one: its last token's, or all of them


class Request:
    """What is left to compute, `len(tokens) + len(draft) - num_computed`, is all that the scheduler plans with.

    tokens   |  prompt  |  output so far  |  draft |
             |---------- computed ---|---- left ---|
    blocks   |  b0  |  b1  |  b2  |  …          cover at least what is computed

    A model with several groups of layers has a table of blocks for each (tables.py): `blocks` is the first group's.
    """

    __slots__ = (
        "arrival", "blocks", "draft", "draft_save", "is_paused", "is_scored", "keys", "limit", "num_cached",
        "num_computed", "num_pending", "num_preemptions", "num_prompt", "num_registered", "number", "other_tables",
        "others", "parting", "pooling", "priority", "released", "root", "saves", "state", "table", "tokens", "turns",
    )  # fmt: skip

    def __init__(self, number: int, prompt: Sequence[int], *, priority: int = 0, root: bytes = b"") -> None:
        self.number = number  # unique in the engine
        self.arrival = number  # a fork inherits its parent's
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.draft: list[int] = []
        self.num_computed = 0
        self.blocks: list[int] = []
        self.others: list[list[int]] = []  # the blocks of the other groups
        self.released: list[int] = []  # of each group: how many first blocks were released, because nothing sees them
        self.table: tuple[int, ...] = ()  # the blocks as plans list them: the same object as long as they are the same
        self.other_tables: tuple[tuple[int, ...], ...] = ()  # likewise
        self.limit = sys.maxsize  # tokens, prompt and output, beyond which nothing is planned ahead
        self.keys: list[bytes] = []  # of the full blocks, as far as they were needed
        self.num_registered = 0  # leading full blocks that were offered to the prefix index
        self.num_pending = 0  # last tokens that the device chose and the host has not seen yet
        self.root = root  # where the chain of keys starts: model, layout, salt
        self.priority = priority  # lower goes first
        self.num_cached = 0  # prompt tokens that the prefix cache gave, at admission
        self.num_preemptions = 0
        self.is_scored = False  # wants logits for every prompt token, so none may come from the prefix cache
        self.pooling: Pooling | None = None  # wants its prompt's hidden rows, and chooses no token
        self.state = -1  # the slot of its recurrent states; -1: none
        self.saves: list[tuple[int, int]] = []  # (position, slot): states after so many tokens, to become snapshots
        self.draft_save: tuple[int, int] | None = None  # likewise, to go back to when a draft is rejected
        self.turns: Sequence[int] = ()  # positions where a conversation's parts begin
        self.parting = 0  # where an earlier prompt was another from there on; 0: nowhere
        self.is_paused = False  # holds its blocks, plans nothing: waits for its siblings, or its last token is PENDING

    @property
    def num_left(self) -> int:
        return len(self.tokens) + len(self.draft) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_known(self) -> int:
        """Tokens that the host has read."""
        return len(self.tokens) - self.num_pending

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where a later prompt may begin to differ from this one: so far must be quick to come back to."""
        return (*self.turns[-MAX_TURNS:], self.num_prompt - 1, self.parting)

    @property
    def may_share(self) -> bool:
        """Whether rows of its prompt may come from the prefix cache: not where each of them is wanted."""
        return not self.is_scored and self.pooling != "mean"

    def key(self, index: int, block_size: int) -> bytes:
        """The key of a full block, chained from those before it."""
        while len(self.keys) <= index:
            at = len(self.keys) * block_size
            parent = self.keys[-1] if self.keys else self.root
            self.keys.append(chain_key(parent, self.tokens[at : at + block_size]))
        return self.keys[index]

    @property
    def turn(self) -> tuple[int, int, int]:
        """Who goes first: priority, then arrival."""
        return (self.priority, self.arrival, self.number)

    def __repr__(self) -> str:
        return (
            f"Request({self.number}: {self.num_prompt}+{self.num_output} tokens, {self.num_computed} computed, "
            f"{len(self.blocks)} blocks)"
        )

"""The states that recurrent layers keep of each running request: its slot, its snapshots, and where it can begin.

A request's slot holds the states after its first `num_computed` tokens, always. A step changes them in place, so what
may be needed again is saved on the way: the step writes the states after certain rows to other slots.

    turn boundaries, and one token before a prompt's end   a request that begins alike goes on from there
    at intervals, and where another prompt parted from it   so does one whose prompt is another after that
    after the last token before a draft                     where to go back to if the draft is rejected

Snapshots share a budget with running requests: a request that needs a slot takes the least recently used one.
"""

from __future__ import annotations

from collections.abc import Iterator

from unspool.cache.blocks import Blocks
from unspool.cache.states import Snapshot, States
from unspool.engine.request import Request

MIN_INTERVAL = 512  # tokens between two snapshots of one prompt, at least
SHARE = 4  # a prompt's snapshots at intervals take one slot in so many


class RecurrentStates:
    def __init__(self, slots: States, blocks: Blocks, *, keeps_snapshots: bool) -> None:
        self.slots, self._blocks, self._keeps_snapshots = slots, blocks, keeps_snapshots
        self._copies: list[tuple[int, int]] = []

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """What the next step copies before it computes anything."""
        copies, self._copies = tuple(self._copies), []
        return copies

    # Where a request begins -----------------------------------------------------------------------------------------
    def find(self, request: Request, num_tokens: int, num_blocks: int) -> tuple[Snapshot | None, int]:
        """The longest snapshot of the request's first `num_tokens` tokens or fewer, and how many tokens it has.

        `num_blocks`: so many full blocks are there to begin from.
        """
        size = self._blocks.block_size
        for index in range(min(num_blocks, num_tokens // size), -1, -1):
            parent = request.key(index - 1, size) if index else request.root
            tokens = request.tokens[index * size : min(num_tokens, (index + 1) * size - 1)]
            for snapshot in self.slots.find(parent, tokens):
                return snapshot, index * size + len(snapshot.rest)
        return None, 0

    def has_partial(self, snapshot: Snapshot) -> bool:
        """Whether the keys and values of a snapshot's last tokens, which fill no block, are there."""
        return not snapshot.rest or self._blocks.find_partial(snapshot.parent, snapshot.rest)[1] == len(snapshot.rest)

    def begin(self, request: Request, snapshot: Snapshot | None) -> None:
        """Give a request a slot, which begins as the snapshot does; without one, as zeros."""
        if snapshot is None:
            request.state = self.slots.allocate()
            return
        self.slots.touch(snapshot)
        request.state = self.slots.allocate()
        if request.state != snapshot.slot:  # else it was the only slot: the snapshot has become the request's own
            self._copies.append((snapshot.slot, request.state))

    def fork(self, parent: Request, child: Request) -> None:
        """Give `child` a copy of the states of `parent`, which has computed as much."""
        child.state = self.slots.allocate()
        self._copies.append((parent.state, child.state))

    def rewind(self, request: Request, num_tokens: int) -> int:
        """Go back to the first `num_tokens` tokens or fewer; how many. The request's own blocks hold them all."""
        kept = [save for save in request.saves if save[0] <= num_tokens]
        for save in request.saves:
            if save not in kept:
                self.slots.release(save[1])
        request.saves = kept
        snapshot, position = self.find(request, num_tokens, len(request.blocks))
        if snapshot is not None:
            self.slots.touch(snapshot)
            self._copies.append((snapshot.slot, request.state))
        return position

    # What a step saves ----------------------------------------------------------------------------------------------
    def save(self, request: Request, start: int, end: int, first_draft: int | None) -> tuple[tuple[int, int], ...]:
        """Slots for the states to save while the tokens from `start` to `end` are computed: (offset, slot).

        `first_draft` is the position of the first drafted token. A slot for the states before it must be free.
        """
        saves = []
        if first_draft is not None:
            request.draft_save = (first_draft, self.slots.allocate())
            saves.append((first_draft - 1 - start, request.draft_save[1]))
        if self._keeps_snapshots:
            for position in sorted(set(self._wanted(request, start, end)) - {first_draft}):
                if self.slots.num_free and not self._is_known(request, position):
                    request.saves.append((position, self.slots.allocate()))
                    saves.append((position - 1 - start, request.saves[-1][1]))
        return tuple(saves)

    def _wanted(self, request: Request, start: int, end: int) -> Iterator[int]:
        points = request.boundaries
        yield from (point for point in points if start < point <= end)
        share = max(1, self.slots.num_slots // SHARE)
        interval = MIN_INTERVAL
        while interval * share < max(request.num_prompt, end):
            interval *= 2
        yield from range((start // interval + 1) * interval, end + 1, interval)

    def _is_known(self, request: Request, position: int) -> bool:
        if position > request.num_known:
            return False
        return self.slots.has(*self._name(request, position))

    def _name(self, request: Request, position: int) -> tuple[bytes, list[int]]:
        size = self._blocks.block_size
        index = position // size
        parent = request.key(index - 1, size) if index else request.root
        return parent, request.tokens[index * size : position]

    # After a step ---------------------------------------------------------------------------------------------------
    def settle_draft(self, request: Request, num_computed: int, num_chosen: int) -> int:
        """How many tokens the request's states are of after a step that had computed `num_computed`, of which
        `num_chosen` are to be kept."""
        if request.draft_save is None:
            return num_chosen
        position, slot = request.draft_save
        request.draft_save = None
        if num_chosen == num_computed:
            self.slots.release(slot)
            return num_chosen
        self.slots.release(request.state)
        request.state = slot
        return position

    def keep(self, request: Request) -> None:
        """Make snapshots of what was saved, as far as its tokens are known."""
        known = min(request.num_known, request.num_computed)
        waiting = []
        for position, slot in request.saves:
            if position <= known:
                self._register_partial(request, position)
                self.slots.store(slot, *self._name(request, position))
            elif position <= request.num_computed:
                waiting.append((position, slot))
            else:  # of a draft that was rejected
                self.slots.release(slot)
        request.saves = waiting

    def _register_partial(self, request: Request, position: int) -> None:
        """Let others find the block that `position` lies in, as far as it is computed. Whoever goes on in it copies it
        first."""
        size = self._blocks.block_size
        index, known = position // size, min(request.num_known, request.num_computed)
        if position % size and known < (index + 1) * size:
            parent, tokens = self._name(request, known)
            self._blocks.register_partial(request.blocks[index], parent, tokens)

    # Leaving --------------------------------------------------------------------------------------------------------
    def drop(self, request: Request, *, is_good: bool) -> None:
        """Take the slot of a request that leaves, before its blocks are released. A good state becomes a snapshot."""
        for _, slot in request.saves:
            self.slots.release(slot)
        if request.draft_save is not None:
            self.slots.release(request.draft_save[1])
        request.saves, request.draft_save = [], None
        if request.state < 0:
            return
        position = request.num_computed
        if is_good and self._keeps_snapshots and 0 < position <= request.num_known:
            self._register_partial(request, position)
            self.slots.store(request.state, *self._name(request, position))
        else:
            self.slots.release(request.state)
        request.state = -1

    def held_by(self, request: Request) -> list[int]:
        """The slots of a request: its own, and those of states that were saved and are no snapshots yet."""
        saved = [slot for _, slot in request.saves]
        drafted = [] if request.draft_save is None else [request.draft_save[1]]
        return [*([request.state] if request.state >= 0 else []), *saved, *drafted]

    @property
    def stats(self) -> dict[str, float]:
        return {
            "states": self.slots.num_slots,
            "states_free": self.slots.num_free,
            "snapshots": self.slots.num_snapshots,
        }

    def check(self, requests: list[Request]) -> None:
        self.slots.check(slot for each in requests for slot in self.held_by(each))

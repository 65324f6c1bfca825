"""Who holds which slot for the states of recurrent layers, and the snapshots that sequences can begin from.

    free       nobody's, nothing worth keeping
    held       of one running sequence, or about to become a snapshot of it
    snapshot   the states after a sequence's first tokens, found by these tokens; the least recently used is given up
               when a slot is needed

A snapshot is found by the key of the full blocks that its tokens fill, and the tokens that follow them. It keeps no
block: whoever would begin from it needs the keys and values of its tokens, too, and looks for them himself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal

from unspool.errors import EngineError
from unspool.records import record


@record(frozen=True, slots=True)
class Snapshot:
    slot: int
    parent: bytes  # the key of the last full block before its end, or where the chain of keys starts
    rest: tuple[int, ...]  # the tokens after that block


class States:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # popped from the end: low numbers first
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()  # by slot, least recently used first
        self._children: dict[bytes, list[Snapshot]] = {}
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Slots that could be allocated now."""
        return len(self._free) + len(self._snapshots)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def state(self, slot: int) -> Literal["free", "held", "snapshot"]:
        """Who has a slot: nobody, a sequence, or whoever begins with the snapshot's tokens."""
        if slot in self._snapshots:
            return "snapshot"
        return "free" if slot in self._free else "held"

    def allocate(self) -> int:
        if self._free:
            return self._free.pop()
        if not self._snapshots:
            raise EngineError("no state is free; the scheduler must preempt before it allocates")
        self.num_evictions += 1
        return self.take(next(iter(self._snapshots.values())))

    def take(self, snapshot: Snapshot) -> int:
        """Make a snapshot's slot a sequence's own: the snapshot is gone, its states are there."""
        self._forget(snapshot)
        return snapshot.slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def store(self, slot: int, parent: bytes, rest: Sequence[int]) -> None:
        """Make a held slot a snapshot. If there is one of the same tokens, that one stays and the slot is free."""
        known = next((each for each in self._children.get(parent, ()) if each.rest == tuple(rest)), None)
        if known is not None:
            self.touch(known)
            self.release(slot)
            return
        snapshot = Snapshot(slot, parent, tuple(rest))
        self._snapshots[slot] = snapshot
        self._children.setdefault(parent, []).append(snapshot)

    def touch(self, snapshot: Snapshot) -> None:
        """It was used: others are given up before it."""
        self._snapshots.move_to_end(snapshot.slot)

    def find(self, parent: bytes, tokens: Sequence[int]) -> list[Snapshot]:
        """The snapshots after the block `parent` whose tokens `tokens` begin with, the longest first."""
        fitting = [each for each in self._children.get(parent, ()) if each.rest == tuple(tokens[: len(each.rest)])]
        return sorted(fitting, key=lambda snapshot: -len(snapshot.rest))

    def has(self, parent: bytes, rest: Sequence[int]) -> bool:
        return any(each.rest == tuple(rest) for each in self._children.get(parent, ()))

    def clear_cache(self) -> None:
        """Forget every snapshot."""
        for snapshot in list(self._snapshots.values()):
            self.release(self.take(snapshot))

    def _forget(self, snapshot: Snapshot) -> None:
        del self._snapshots[snapshot.slot]
        siblings = self._children[snapshot.parent]
        siblings.remove(snapshot)
        if not siblings:
            del self._children[snapshot.parent]

    # The invariant --------------------------------------------------------------------------------------------------
    def check(self, held: Iterable[int]) -> None:
        """Every slot is free, a snapshot, or held by exactly one of those who say so; raises AssertionError."""
        slots = [*self._free, *self._snapshots, *held]
        assert sorted(slots) == list(range(self.num_slots)), f"slots are lost or have two owners: {sorted(slots)}"
        indexed = [each for siblings in self._children.values() for each in siblings]
        assert len(indexed) == len(self._snapshots), "the index disagrees"
        assert all(self._snapshots.get(each.slot) is each for each in indexed), "the index disagrees"

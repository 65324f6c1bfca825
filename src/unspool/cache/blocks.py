"""Who holds which block of the KV cache: reference counts, a free list, and the index of computed prefixes.

    free     no owner, nothing worth keeping                    _free
    cached   no owner, holds a computed prefix                  _cached   (least recently used first)
    held     one owner or more; registered if its key is known  _owners > 0

    allocate: free → held, else the oldest cached one is forgotten and → held
    release:  the last owner goes: registered → cached, else → free

A block that is registered or has several owners is never written: whoever must write copies it first.
Where layers see all keys, an owner of a block owns all blocks before it in its sequence and releases them last to
first, so in the order of release a block always comes before its parent, and forgetting the oldest never orphans a
child.

Where layers see a window of keys, a sequence also releases its first blocks while it runs: those that no token to come
sees. They stay findable. A sequence may begin after any of its blocks whose window before it is still there.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

from unspool.digest import blake2b
from unspool.errors import EngineError
from unspool.plan import NO_BLOCK

# Kernels read keys in tiles of at most so many positions, from position 0 on: the first tile that a token reads may
# begin before its window.
KEY_TILE = 64
REWIND = 16  # tokens that a sequence can go back without losing its place, at least


def root_key(*parts: str) -> bytes:
    """The key that a chain starts from: all that changes keys and values besides tokens (model, layout, salt)."""
    return blake2b("\0".join(parts).encode(), digest_size=16).digest()


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block that follows `parent` and holds `tokens`."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


def blocks_in_window(window: int, block_size: int, num_tokens: int) -> int:
    """The most blocks that a sequence holds while it computes so many tokens at once."""
    return -(-(window + REWIND + KEY_TILE + num_tokens) // block_size) + 1


class BlockListener(Protocol):
    """Is notified of what the index of computed prefixes holds. Called by the engine's thread: it must not block."""

    def stored(self, key: bytes, parent: bytes, tokens: Sequence[int]) -> None: ...
    def removed(self, key: bytes) -> None: ...


class Blocks:
    def __init__(self, num_blocks: int, block_size: int, window: int | None = None) -> None:
        """`window`: keys that a token sees, itself included; None: all."""
        self.num_blocks, self.block_size, self.window = num_blocks, block_size, window
        self._owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: low numbers first
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, tuple[bytes, bytes, tuple[int, ...]]] = {}  # block: (key, parent's key, tokens)
        self._children: dict[bytes, set[int]] = {}  # parent's key: blocks that follow it
        self.num_evictions = 0
        self.listener: BlockListener | None = None

    @property
    def num_free(self) -> int:
        """Blocks that could be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def state(self, block: int) -> Literal["free", "cached", "private", "shared"]:
        """Who has a block: nobody, the index of prefixes alone, one sequence, or several."""
        owners = self._owners[block]
        if owners:
            return "private" if owners == 1 else "shared"
        return "cached" if block in self._cached else "free"

    def allocate(self) -> int:
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self.num_evictions += 1
        else:
            raise EngineError("no block is free; the scheduler must preempt before it allocates")
        self._owners[block] = 1
        return block

    def share(self, block: int) -> None:
        """Become one more owner of a held or cached block."""
        if self._owners[block] == 0:
            del self._cached[block]
        self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up a sequence's blocks, first to last as they stand in it."""
        for block in reversed(list(blocks)):
            if block != NO_BLOCK:
                self._release_one(block)

    def release_first(self, block: int, *, is_likely: bool) -> None:
        """Give up the first block that a sequence still has. Unless it is likely to be found again, it is forgotten
        before the blocks that are cached already."""
        self._release_one(block)
        if not is_likely and block in self._cached:
            self._cached.move_to_end(block, last=False)

    def _release_one(self, block: int) -> None:
        self._owners[block] -= 1
        if self._owners[block] == 0:
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def first_needed(self, position: int) -> int:
        """The place in a sequence of the first block that its tokens from `position` on read."""
        if self.window is None:
            return 0
        return max(0, position + 1 - self.window) // KEY_TILE * KEY_TILE // self.block_size

    def is_writable(self, block: int) -> bool:
        return self._owners[block] == 1 and block not in self._key_of

    # The index of computed prefixes ---------------------------------------------------------------------------------
    def register(self, block: int, key: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        """Make a full, computed block findable. A key that is known already keeps the block it has."""
        if key in self._block_of or block in self._key_of:
            return
        self._block_of[key] = block
        self._key_of[block] = (key, parent, tuple(tokens))
        self._children.setdefault(parent, set()).add(block)
        if self.listener is not None:
            self.listener.stored(key, parent, tokens)

    def register_partial(self, block: int, parent: bytes, tokens: Sequence[int]) -> None:
        """Make a held block findable that is computed as far as these tokens go, which do not fill it. Its owner copies
        it before going on; so it stays as it is."""
        self.register(block, chain_key(parent, tokens), parent, tokens)

    def find(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def find_partial(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """The registered block after `parent` that shares most leading tokens: (block, how many), or (-1, 0)."""
        best, most = -1, 0
        for block in self._children.get(parent, ()):
            count = 0
            for a, b in zip(self._key_of[block][2], tokens, strict=False):
                if a != b:
                    break
                count += 1
            if count > most or (count == most and count and block < best):
                best, most = block, count
        return best, most

    def registered_keys(self, most: int) -> list[bytes]:
        """The keys of computed blocks, at most so many: those in use, and the most recently used of the others."""
        held = [block for block in self._key_of if self._owners[block]]
        return [self._key_of[block][0] for block in [*self._cached, *held][-most:]]

    def unregister(self, block: int) -> None:
        """Make a held block private again, so that its one owner may write it."""
        if block in self._key_of:
            self._forget(block)

    def num_owners(self, block: int) -> int:
        return self._owners[block]

    def clear_cache(self) -> None:
        """Forget every prefix that nobody holds."""
        for block in list(self._cached):
            self._forget(block)
            self._free.append(block)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        key, parent, _ = self._key_of.pop(block)
        del self._block_of[key]
        if self.listener is not None:
            self.listener.removed(key)
        siblings = self._children[parent]
        siblings.discard(block)
        if not siblings:
            del self._children[parent]

    # The invariant --------------------------------------------------------------------------------------------------
    def check(self, held: Iterable[Sequence[int]] = ()) -> None:
        """Every block is free, cached or held, by exactly those who say they hold it; raises AssertionError."""
        owners = [0] * self.num_blocks
        for sequence in held:
            for block in sequence:
                if block != NO_BLOCK:
                    owners[block] += 1
        assert owners == self._owners, f"owners {owners} differ from counts {self._owners}"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, f"blocks {free & cached} are free and cached"
        assert free | cached == {b for b, n in enumerate(owners) if n == 0}, "a block was lost"
        assert not free & set(self._key_of), "a free block is registered"
        assert cached <= set(self._key_of), "a cached block is not registered"
        assert {key: block for block, (key, _, _) in self._key_of.items()} == self._block_of, "the index disagrees"
        children = {block for blocks in self._children.values() for block in blocks}
        assert children == set(self._key_of), "a registered block has no parent entry"


@contextmanager
def borrowed(
    groups: Sequence[Blocks], num_sequences: int, start: int, num_tokens: int
) -> Iterator[list[list[tuple[int, ...]]]]:
    """For measurements: blocks for sequences that compute so many tokens behind `start` others. Each sequence has a
    table of each group's blocks, which nobody else holds meanwhile."""
    size = groups[0].block_size
    count = -(-(start + num_tokens) // size)
    held: list[list[list[int]]] = [[[] for _ in groups] for _ in range(num_sequences)]
    try:
        for tables in held:
            for group, table in zip(groups, tables, strict=True):
                first = group.first_needed(start)
                table += [NO_BLOCK] * first
                for _ in range(first, count):
                    table.append(group.allocate())
        yield [[tuple(table) for table in tables] for tables in held]
    finally:
        for tables in held:
            for group, table in zip(groups, tables, strict=True):
                group.release(table)

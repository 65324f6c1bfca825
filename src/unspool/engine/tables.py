"""What requests hold of a model's blocks. Plain Python.

Layers that keep keys equally long are a group, with blocks of their own (`Blocks`) and a table for each request. All
tables of a request have the same length, and the block at a place holds the same tokens in each of them.

    no window   |  b0  |  b1  |  b2  |  b3  |  b4  |
    window      |  –   |  –   |  –   |  b7  |  b2  |        – : released, because no token to come sees it

Groups with a window release their first blocks before a request takes more, so what it holds of them is bounded,
however long it gets. A request can go back a few tokens (REWIND); to go back further it begins again, as
after a preemption.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unspool.cache.blocks import REWIND, Blocks, blocks_in_window
from unspool.engine.request import Request
from unspool.plan import NO_BLOCK

Copies = list[tuple[int, int, int]]  # source, target, group


class Tables:
    def __init__(self, groups: Sequence[Blocks], step_tokens: int) -> None:
        """A caller that asks for one number gets that of the first group's blocks."""
        self.groups, self.others, self.main = tuple(groups), tuple(groups[1:]), groups[0]
        self.size = self.main.block_size
        self.windowed = tuple((index, group) for index, group in enumerate(groups) if group.window is not None)
        # Of each group: the most blocks that a request holds at once.
        self._most = [
            group.num_blocks
            if group.window is None
            else min(group.num_blocks, blocks_in_window(group.window, self.size, step_tokens))
            for group in groups
        ]

    def begin(self, request: Request) -> None:
        """A request comes, with no blocks yet."""
        request.others = [[] for _ in self.others]
        request.released = [0] * len(self.groups)

    def of(self, request: Request) -> Iterable[tuple[Blocks, list[int]]]:
        """Each group's blocks, and the request's table of them."""
        return zip(self.groups, (request.blocks, *request.others), strict=True)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    # Room -----------------------------------------------------------------------------------------------------------
    def fits(self, request: Request, count: int) -> bool:
        """Whether the blocks that a request has, its own, hold what is to come."""
        start, blocks = request.num_computed, request.blocks
        index = start // self.size
        if start + count > len(blocks) * self.size or not self.main.is_writable(blocks[index]):
            return False
        return not self.others or self.are_writable(request, index)

    def are_writable(self, request: Request, index: int) -> bool:
        """Whether all blocks at a place, apart from the first group's, are the request's own."""
        return all(
            group.is_writable(table[index]) for group, table in zip(self.others, request.others, strict=True)
        )

    def has_room(self, request: Request, count: int) -> bool:
        start = request.num_computed
        missing, index = max(0, self.num_blocks(start + count) - len(request.blocks)), start // self.size
        for group, table in self.of(request):
            must_copy = index < len(table) and group.num_owners(table[index]) > 1
            if missing + must_copy > group.num_free:
                return False
        return True

    def has_room_for_all(self, request: Request) -> bool:
        """Whether a request that waits finds room for all of its tokens, as far as they are kept."""
        total = self.num_blocks(len(request.tokens))
        for (group, table), most, released in zip(self.of(request), self._most, request.released, strict=True):
            if min(total - released, most) - (len(table) - released) > group.num_free:
                return False
        return True

    def most_tokens(self, request: Request, count: int) -> int:
        """How many of the next `count` tokens can be computed at once, if all blocks were the request's."""
        for index, group in self.windowed:
            count = min(count, (request.released[index] + group.num_blocks) * self.size - request.num_computed)
        return count

    # Taking and releasing -------------------------------------------------------------------------------------------
    def extend(self, request: Request, count: int) -> None:
        """Take `count` more blocks of each group."""
        for group, table in self.of(request):
            table.extend(group.allocate() for _ in range(count))

    def make_writable(self, request: Request, index: int, copies: Copies, missing: int) -> None:
        """Copy on write, of each group's block at a place. If no block is free to copy to, apart from those that are
        missing, a block that only the index of prefixes holds leaves the index instead."""
        for number, (group, table) in enumerate(self.of(request)):
            block = table[index]
            if group.is_writable(block):
                continue
            if group.num_free <= missing and group.num_owners(block) == 1:
                group.unregister(block)
                continue
            table[index] = group.allocate()
            request.table = ()
            copies.append((block, table[index], number))
            group.release([block])

    def release_passed(self, request: Request) -> None:
        """Release the blocks that no token to come sees, even if the last few are taken back."""
        start = max(0, request.num_computed - REWIND)
        for index, group in self.windowed:
            first, released = group.first_needed(start), request.released[index]
            if first <= released:
                continue
            table = request.others[index - 1] if index else request.blocks
            kept = self._kept_ranges(group, request)
            for place in range(released, first):
                group.release_first(table[place], is_likely=any(place in each for each in kept))
                table[place] = NO_BLOCK
            request.released[index] = first
            request.table = ()

    def _kept_ranges(self, group: Blocks, request: Request) -> list[range]:
        """The blocks that are needed to begin where others may: where a conversation's parts begin, at the prompt's
        end, and where an earlier prompt parted from this one."""
        points = request.boundaries
        return [range(group.first_needed(point), point // self.size + 1) for point in points if point]

    def keep(self, request: Request, count: int) -> None:
        """Release all but the first `count` blocks."""
        for group, table in self.of(request):
            group.release(table[count:])
            del table[count:]
        request.released = [min(each, count) for each in request.released]
        request.table = ()

    def has_window(self, request: Request, position: int) -> bool:
        """Whether all blocks are there that a request needs to go on from `position`."""
        return all(request.released[index] <= group.first_needed(position) for index, group in self.windowed)

    def share(self, parent: Request, child: Request) -> None:
        """Give a fork the blocks of what it has computed."""
        count = self.num_blocks(child.num_computed)
        child.blocks = parent.blocks[:count]
        child.others = [table[:count] for table in parent.others]
        child.released = [min(each, count) for each in parent.released]
        for group, table in self.of(child):
            for block in table:
                if block != NO_BLOCK:
                    group.share(block)

    # Prefixes -------------------------------------------------------------------------------------------------------
    def register(self, request: Request, num_known: int) -> None:
        """Make the full blocks of the first tokens findable."""
        size = self.size
        for index in range(request.num_registered, num_known // size):
            key = request.key(index, size)
            parent = request.keys[index - 1] if index else request.root
            tokens = request.tokens[index * size : (index + 1) * size]
            for group, table in self.of(request):
                if table[index] != NO_BLOCK:
                    group.register(table[index], key, parent, tokens)
            request.num_registered = index + 1

    def share_prefix(self, request: Request) -> int:
        """Share the computed blocks that the request's tokens begin with, which has none yet; one token is left, for
        its logits. Returns how many tokens were found computed, whether or not their windows are still there."""
        most = (len(request.tokens) - 1) // self.size
        count = found = self._num_found(request, most)
        if self.windowed:
            count, last = self._longest(request, found)
            found = last if self.main.window is not None else found
        for number, (group, table) in enumerate(self.of(request)):
            first = group.first_needed(count * self.size)
            table += [NO_BLOCK] * first
            for index in range(first, count):
                block = group.find(request.key(index, self.size))
                assert block is not None
                group.share(block)
                table.append(block)
            request.released[number] = first
        request.num_computed = count * self.size
        return found * self.size

    def _num_found(self, request: Request, most: int) -> int:
        """How many blocks the groups without a window have; `most` if there is no such group."""
        for group in self.groups:
            if group.window is None:
                most = next((at for at in range(most) if group.find(request.key(at, self.size)) is None), most)
        return most

    def _longest(self, request: Request, most: int) -> tuple[int, int]:
        """The most blocks, of the first `most`, that the groups with windows can go on after; and how many blocks there
        are up to the last one that is there."""
        runs = [0] * len(self.windowed)  # of each: so many blocks before this place are there, one after the other
        longest = last = 0
        for count in range(1, most + 1):
            key = request.key(count - 1, self.size)
            fits = True
            for number, (_, group) in enumerate(self.windowed):
                runs[number] = runs[number] + 1 if group.find(key) is not None else 0
                fits = fits and runs[number] >= count - group.first_needed(count * self.size)
            longest = count if fits else longest
            last = count if any(runs) else last
        return longest, last

    def copy_partial(self, request: Request, tokens: Sequence[int], copies: Copies, *, whole: bool) -> bool:
        """Copy the registered blocks that begin as these tokens do, the request's next; whether it has them all. With
        `whole`, all or nothing."""
        parent = request.keys[len(request.blocks) - 1] if request.blocks else request.root
        found = [group.find_partial(parent, tokens) if tokens else (-1, 0) for group in self.groups]
        count = min(each for _, each in found)
        has_room = all(group.num_free >= 2 for group in self.groups)
        if count == 0 or not has_room or (whole and count < len(tokens)):
            return not tokens
        for number, ((group, table), (block, _)) in enumerate(zip(self.of(request), found, strict=True)):
            group.share(block)  # so that the allocation cannot take it
            table.append(group.allocate())
            copies.append((block, table[-1], number))
            group.release([block])
        request.num_computed += count
        return count == len(tokens)

    # The invariant --------------------------------------------------------------------------------------------------
    @property
    def stats(self) -> dict[str, float]:
        """The share of blocks in use, of the group that has the largest; and the blocks of groups after the first."""
        counts: dict[str, float] = {
            "cache_usage": max(1 - group.num_free / group.num_blocks for group in self.groups)
        }
        for group in self.others:
            counts[f"window_{group.window}_blocks"] = group.num_blocks
            counts[f"window_{group.window}_blocks_free"] = group.num_free
        return counts

    def check(self, requests: Sequence[Request]) -> None:
        """Every block of every group is accounted for; raises AssertionError."""
        for number, group in enumerate(self.groups):
            group.check(request.others[number - 1] if number else request.blocks for request in requests)
        for request in requests:
            for (group, table), released in zip(self.of(request), request.released, strict=True):
                assert len(table) == len(request.blocks), f"{request} has tables of different lengths"
                assert table[:released] == [NO_BLOCK] * released, f"{request} holds blocks that it released"
                assert NO_BLOCK not in table[released:], f"{request} lacks a block"
                needed = group.first_needed(request.num_computed)
                assert not table or released <= needed, f"{request} lacks a block of its window"

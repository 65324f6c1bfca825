"""Short keys of a prompt's blocks: computed by a router, compared with those that replicas report."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence

from unspool.cache.blocks import chain_key, root_key

KEY_BYTES = 8  # of a block's key: two blocks are confused once in 2 ** 64, and that costs a cache hit, not an answer
MAX_REPORTED = 8192  # keys that a replica reports: the most recently used
MAX_CHAIN = 4096  # blocks of a prompt that are looked up
EXPECTED_SECONDS = 30.0  # how long a router expects what it sent to a replica to be reported


def short(key: bytes) -> str:
    return key[:KEY_BYTES].hex()


def split_keys(joined: str) -> list[str]:
    """Short keys that were joined to one text: a replica reports thousands of them every second."""
    return [joined[start : start + 2 * KEY_BYTES] for start in range(0, len(joined), 2 * KEY_BYTES)]


def prompt_chain(prompt: Sequence[int], *, model: str, layout: str, salt: str | None, block_size: int) -> list[str]:
    """The keys of a prompt's whole blocks, as the engine's prefix cache computes them."""
    key, chain = root_key(model, layout, salt or ""), []
    for start in range(0, min(len(prompt) - block_size, MAX_CHAIN * block_size) + 1, block_size):
        key = chain_key(key, prompt[start : start + block_size])
        chain.append(short(key))
    return chain


class Expected:
    """Blocks that a replica will have soon, since requests with them were sent to it: reports come later."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()
        self._now = clock

    def add(self, chain: Iterable[str]) -> None:
        until = self._now() + EXPECTED_SECONDS
        for key in chain:
            self._until[key] = until
            self._until.move_to_end(key)
        while len(self._until) > MAX_REPORTED:
            self._until.popitem(last=False)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._until.get(key, -1.0) >= self._now()


class Holdings:
    """The blocks that a replica has, by its last report, or will have soon."""

    def __init__(self, reported: Container[str] = (), expected: Container[str] = ()) -> None:
        self._reported, self._expected = reported, expected

    def __contains__(self, key: object) -> bool:
        return key in self._reported or key in self._expected

"""Which replica takes a request: a pure function of the request's blocks and of what replicas have reported.

The rule, in order:

1. A replica that is in `avoid` (it was lost, or has no room) or is draining takes nothing.
2. Each replica has a *load* (requests that it runs or queues) and a *match*: the share of the prompt, in whole blocks
   from its beginning, that it has computed already.
3. A replica is *overloaded* if its load exceeds the least load by more than `slack` requests and by more than the
   factor `imbalance`.
4. Of the replicas that are not overloaded the one with the longest match wins, if that match is at least `min_match`
   of the prompt.
5. Otherwise the one with the least load wins. Ties go to the replica that the prompt's first block hashes to, so that
   equal beginnings that arrive together go to one replica before any of them is computed.

With `by_prefix` off only the loads count, and ties go to the replica that the whole prompt hashes to: with two replicas
this is power-of-two-choices routing, which benchmarks compare with.

The whole ranking is returned, best first: if the first cannot take the request, the next one is tried.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True)
class ReplicaView:
    """A replica as a router knows it."""

    name: str
    load: int
    prefixes: Container[str] = frozenset()  # short keys of the blocks that it has computed
    is_draining: bool = False


@dataclass(frozen=True)
class Rule:
    """The numbers of the rule above."""

    slack: int = 4
    imbalance: float = 1.5
    min_match: float = 0.1
    by_prefix: bool = True  # False: by load alone


RULE = Rule()


def rank(
    chain: Sequence[str], replicas: Sequence[ReplicaView], rule: Rule = RULE, avoid: Collection[str] = ()
) -> list[str]:
    """The names of the replicas that may take a request whose blocks have these keys, best first."""
    able = [each for each in replicas if each.name not in avoid and not each.is_draining]
    if not able:
        return []
    limit = overload_limit(min(each.load for each in able), rule)
    tie = "" if not chain else chain[0] if rule.by_prefix else chain[-1]

    def key(each: ReplicaView) -> tuple[bool, int, int, bytes]:
        match = num_matched(chain, each.prefixes) if rule.by_prefix else 0
        if match < rule.min_match * len(chain):
            match = 0
        is_overloaded = each.load > limit
        return (is_overloaded, 0 if is_overloaded else -match, each.load, _affinity(tie, each.name))

    return [each.name for each in sorted(able, key=key)]


def overload_limit(least: int, rule: Rule) -> float:
    """The greatest load of a replica that still may be preferred for its prefix."""
    return max(least + rule.slack, least * rule.imbalance)


def num_matched(chain: Sequence[str], prefixes: Container[str]) -> int:
    """How many blocks from the beginning of a prompt are among these."""
    count = 0
    for key in chain:
        if key not in prefixes:
            break
        count += 1
    return count


def _affinity(block: str, name: str) -> bytes:
    """Rendezvous hashing: each block orders the replicas in its own way, and a lost replica moves only its own."""
    return blake2b(f"{block}\0{name}".encode(), digest_size=8).digest()

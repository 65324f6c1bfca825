"""NUMA nodes of this machine, and keeping a process and its memory on one of them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unspool.errors import BackendError

NODES = Path("/sys/devices/system/node")
MPOL_BIND = 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


@dataclass(frozen=True)
class Node:
    """A node: its number and the processors of it that this process may use."""

    number: int
    processors: tuple[int, ...]


def nodes(root: Path = NODES, allowed: Iterable[int] | None = None) -> list[Node]:
    """The nodes that have memory and a processor that this process may use. Without the kernel's list: one, of all."""
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    found = []
    for path in sorted(root.glob("node[0-9]*"), key=lambda each: int(each.name[4:])):
        processors = parse_list((path / "cpulist").read_text()) & usable
        if processors and _has_memory(path):
            found.append(Node(int(path.name[4:]), tuple(sorted(processors))))
    return found or [Node(0, tuple(sorted(usable)))]


def parse_list(text: str) -> set[int]:
    """The kernel's form of a set of processors, as in 0-3,8,10-11."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def bind(node: Node, root: Path = NODES) -> None:
    """Keep this process and every thread that it starts on a node, and take its memory from there."""
    os.sched_setaffinity(0, node.processors)
    if len(list(root.glob("node[0-9]*"))) < 2:
        return  # one node has all memory
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    mask = ctypes.c_ulong(1 << node.number)
    bits = 8 * ctypes.sizeof(mask)
    if libc.syscall(number, MPOL_BIND, ctypes.byref(mask), bits + 1) != 0:
        why = os.strerror(ctypes.get_errno())
        raise BackendError(f"memory cannot be bound to NUMA node {node.number}: {why}; serve without --replicas numa")


def _has_memory(path: Path) -> bool:
    try:
        text = (path / "meminfo").read_text()
    except OSError:
        return True
    return any("MemTotal:" in line and int(line.split()[-2]) > 0 for line in text.splitlines())

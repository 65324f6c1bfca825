"""The tensors from which a latent layer's rows of queries and keys are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unspool.ops.graph import Arrange, Attention, Graph, Join, Node


@dataclass(frozen=True)
class Sources:
    """The tensors of a latent layer's rows: at most three nodes. For each head, and for the key: which of them holds
    its first channels and from which column on, and the same for its latents."""

    nodes: tuple[Node, ...]
    table: tuple[tuple[int, int, int, int], ...]
    skipped: tuple[Node, ...]  # nodes that are not computed, because nothing else reads them


def sources_of(node: Attention, readers: dict[Node, list[Node]]) -> Sources:
    """The layer's sources. If its rows only concatenate parts of other nodes, as models do, nothing is copied."""
    spec, x = node.spec, node.x
    turned, heads = spec.head_dim - spec.value_dim, spec.num_heads + 1
    starts = [(h * spec.head_dim, h * spec.head_dim + turned) for h in range(heads)]
    whole = Sources((x,), tuple((0, first, 0, rest) for first, rest in starts), ())
    if not isinstance(x, Arrange) or len(readers[x]) != 1 or any(part.norm != "copy" for part in x.parts):
        return whole
    joins: list[Node] = []
    pieces = _pieces(x.x, readers, joins)
    if not joins or len(pieces) > 3:
        return whole
    columns = [start for part in x.parts for start in range(part.start, part.start + part.width)]
    found = []
    for first, rest in starts:
        places = (_place(columns[first:rest], pieces), _place(columns[rest : first + spec.head_dim], pieces))
        if places[0] is None or places[1] is None:
            return whole
        found.append((*places[0], *places[1]))
    return Sources(tuple(pieces), tuple(found), (x, *joins))


def _pieces(x: Node, readers: dict[Node, list[Node]], joins: list[Node]) -> list[Node]:
    if not isinstance(x, Join) or len(readers[x]) != 1:
        return [x]
    joins.append(x)
    return [*_pieces(x.x, readers, joins), *_pieces(x.y, readers, joins)]


def _place(columns: Sequence[int], pieces: Sequence[Node]) -> tuple[int, int] | None:
    """The piece that contains these columns consecutively, and the first column; None if there is no such piece."""
    if list(columns) != list(range(columns[0], columns[0] + len(columns))):
        return None
    start = columns[0]
    for index, piece in enumerate(pieces):
        if start < piece.width:
            return (index, start) if start + len(columns) <= piece.width else None
        start -= piece.width
    return None


def all_sources(graph: Graph, device: torch.device) -> dict[Node, tuple[Sources, Tensor]]:
    """The sources of every latent layer, and its table on the device."""
    found: dict[Node, tuple[Sources, Tensor]] = {}
    readers = graph.readers()
    for node in graph.nodes:
        if isinstance(node, Attention) and node.spec.latent:
            sources = sources_of(node, readers)
            found[node] = sources, torch.tensor(sources.table, dtype=torch.int32, device=device)
    return found

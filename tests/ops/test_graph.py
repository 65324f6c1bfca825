"""The graph of a step: what is recorded, and which rows are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from unspool.config import ModelConfig
from unspool.errors import EngineError
from unspool.models.random import random_checkpoint
from unspool.models.registry import build
from unspool.models.shapes import SHAPES
from unspool.ops.graph import (
    Attention,
    Embed,
    Gated,
    Graph,
    Linear,
    Node,
    Norm,
    RecordingOps,
    Take,
    only_wanted_rows,
    record_step,
)
from unspool.records import record

KV: Any = None


@record(frozen=True)
class Matrix:
    name: str
    in_features: int
    out_features: int


class Ops(RecordingOps):
    """Records, and has no kernels."""

    name = kernel_set = "nothing"

    def matrix(self, parts: Any) -> Matrix:
        return Matrix(parts[0].name, parts[0].shape[1], sum(part.shape[0] for part in parts))

    def vector(self, parts: Any) -> list[float]:
        return [0.0] * sum(part.shape[0] for part in parts)


def recorded(forward: Callable[..., Any]) -> Graph:
    return only_wanted_rows(record_step(forward, KV))


def model_graph(config: ModelConfig) -> Graph:
    ops: Any = Ops()
    return recorded(build(config, random_checkpoint(config, format="f32").weights, ops))


def rows(graph: Graph) -> list[tuple[str, str]]:
    return [(type(node).__name__, "wanted" if node.narrow else "all") for node in graph.nodes]


TABLE, SQUARE, WIDE = Matrix("table", 8, 100), Matrix("square", 8, 8), Matrix("wide", 8, 32)


@pytest.mark.parametrize("shape", ["tiny", "tiny-gemma3", "tiny-qwen3"])
def test_only_the_last_attention_and_what_follows_are_computed_for_wanted_rows(shape: str) -> None:
    config = replace(SHAPES[shape], num_layers=2)
    graph = model_graph(config)
    attentions = [node for node in graph.nodes if isinstance(node, Attention)]
    assert [node.narrow for node in attentions] == [False, True]
    takes = [node for node in graph.nodes if isinstance(node, Take)]
    assert len(takes) == 1, "the stream beside the last attention"
    assert not takes[0].x.narrow
    assert not attentions[1].x.narrow, "every row's keys and values are stored"
    after = graph.nodes[graph.nodes.index(attentions[1]) + 1 :]
    assert all(node.narrow for node in after)
    assert all(not node.narrow for node in graph.nodes[: graph.nodes.index(attentions[1])])
    assert graph.output is graph.nodes[-1]
    assert graph.output.width == config.vocab_size


def test_a_model_that_returns_all_rows_takes_none() -> None:
    ops = Ops()
    graph = recorded(lambda batch, kv: ops.linear(ops.embed(batch, TABLE), SQUARE))
    assert rows(graph) == [("Embed", "all"), ("Linear", "all")]
    assert str(graph) == "%0 = Embed(): 8 values, all rows\n%1 = Linear(x=%0): 8 values, all rows"


def test_what_others_read_of_all_rows_stays_whole() -> None:
    """A shared input is computed once, for all rows, and taken once."""
    ops = Ops()

    def forward(batch: Any, kv: Any) -> Any:
        x = ops.embed(batch, TABLE)
        a = ops.take(ops.linear(x, SQUARE), batch)
        b = ops.take(ops.norm(x, [0.0] * 8, 1e-5), batch)
        return ops.linear(a, SQUARE, residual=b)

    assert rows(recorded(forward)) == [
        ("Embed", "all"),
        ("Take", "wanted"),
        ("Linear", "wanted"),
        ("Norm", "wanted"),
        ("Linear", "wanted"),
    ]


@record(frozen=True, eq=False, repr=False)
class Scan(Node):
    """A recurrence over all rows of a sequence, whose kernel gives all rows."""

    mixes_rows: ClassVar[bool] = True
    can_narrow: ClassVar[bool] = False

    x: Node

    @property
    def width(self) -> int:
        return self.x.width


def test_nodes_that_read_taken_rows_must_read_nothing_else() -> None:
    ops = Ops()

    def half_taken(batch: Any, kv: Any) -> Any:
        x = ops.embed(batch, TABLE)
        return ops.linear(ops.take(x, batch), SQUARE, residual=x)

    def scans_late(batch: Any, kv: Any) -> Any:
        return Scan(ops.take(ops.embed(batch, TABLE), batch))

    for forward in (half_taken, scans_late):
        with pytest.raises(EngineError, match="needs all rows of an input of which only the wanted ones were taken"):
            recorded(forward)


def test_a_node_that_cannot_leave_rows_out_is_taken_from() -> None:
    ops = Ops()
    graph = recorded(lambda batch, kv: ops.take(ops.linear(Scan(ops.embed(batch, TABLE)), SQUARE), batch))
    assert rows(graph) == [("Embed", "all"), ("Scan", "all"), ("Take", "wanted"), ("Linear", "wanted")]


def test_equal_calls_are_two_nodes_and_unread_ones_are_left_out() -> None:
    ops = Ops()

    def forward(batch: Any, kv: Any) -> Any:
        x = ops.embed(batch, TABLE)
        ops.gated(x, WIDE, "silu")
        return ops.linear(ops.linear(x, SQUARE), SQUARE)

    graph = recorded(forward)
    assert [type(node) for node in graph.nodes] == [Embed, Linear, Linear]
    assert graph.nodes[1] is not graph.nodes[2]
    readers = graph.readers()
    assert readers[graph.nodes[0]] == [graph.nodes[1]]


def test_widths_are_checked_when_they_are_recorded() -> None:
    ops = Ops()
    x = ops.embed(None, TABLE)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="the input of odd has 4 values a row; 8 are given"):
        ops.linear(x, Matrix("odd", 4, 8))
    with pytest.raises(EngineError, match="the residual of wide has 32 values a row; 8 are given"):
        ops.linear(x, WIDE, residual=x)
    with pytest.raises(EngineError, match="a norm's weight has 3 values a row; 8 are given"):
        ops.norm(x, [0.0] * 3, 1e-5)
    with pytest.raises(EngineError, match="odd: a gate and an up projection of one size are needed"):
        ops.gated(x, Matrix("odd", 8, 9), "silu")
    assert isinstance(ops.gated(x, WIDE, "silu"), Gated)
    assert ops.gated(x, WIDE, "silu").width == 16


def test_inputs_are_the_fields_that_hold_nodes() -> None:
    x, y = Embed(TABLE, 1.0), Embed(TABLE, 1.0)
    assert Norm(x, [0.0] * 8, 1e-5, None).inputs == {"x": x}
    both: dict[str, Node] = Norm(x, [0.0] * 8, 1e-5, y).inputs
    assert both == {"x": x, "residual": y}
    assert repr(x) == "<Embed of 8 values, all rows>"


def test_a_model_that_returns_no_rows_is_refused() -> None:
    with pytest.raises(EngineError, match="must return the rows of one operation, not NoneType"):
        record_step(lambda batch, kv: None, KV)

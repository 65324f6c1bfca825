"""Which experts a row uses: tables of logits, and the native routing beside the specification."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from unspool.ops.routing import Routing, choose_experts

ROW = np.array([[0.0, 2.0, 1.0, 2.0, -1.0, 0.5]], np.float32)


def chosen(routing: Routing, rows: np.ndarray = ROW) -> list[int]:
    return [int(each) for each in choose_experts(rows, routing)[0][0]]


def test_the_best_experts_are_chosen_and_of_equal_ones_the_lower() -> None:
    assert chosen(Routing(6, 3)) == [1, 3, 2]
    assert chosen(Routing(6, 4), np.zeros((1, 6), np.float32)) == [0, 1, 2, 3]


def test_weights_are_normalized_among_the_chosen() -> None:
    weights = choose_experts(ROW, Routing(6, 2, scale=2.5))[1][0]
    assert weights == pytest.approx([1.25, 1.25])


def test_weights_that_are_not_normalized_are_shares_of_all() -> None:
    weights = choose_experts(ROW, Routing(6, 2, normalized=False))[1][0]
    powers = np.exp(ROW[0])
    assert weights == pytest.approx([powers[1] / powers.sum()] * 2)


def test_sigmoid_scores_stand_for_themselves() -> None:
    weights = choose_experts(ROW, Routing(6, 1, scoring="sigmoid", normalized=False))[1][0]
    assert weights == pytest.approx([1 / (1 + np.exp(-2.0))])


def test_a_choice_bias_changes_the_choice_and_not_the_weight() -> None:
    bias = array("f", [0, 0, 0, 0, 9, 0])
    experts, weights = choose_experts(ROW, Routing(6, 1, scoring="sigmoid", normalized=False, choice_bias=bias))
    assert experts[0, 0] == 4
    assert weights[0] == pytest.approx([1 / (1 + np.exp(1.0))])


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    routing = Routing(6, 2, num_groups=3, num_used_groups=1)
    assert chosen(routing) == [3, 2]  # the groups' sums of two: 2.0, 3.0, -0.5 as logits
    assert chosen(Routing(6, 2, num_groups=3, num_used_groups=1, group_top=1)) == [1, 0]  # equal groups: the lower


def test_an_experts_own_scale_counts() -> None:
    scale = array("f", [1, 2, 1, 3, 1, 1])
    weights = choose_experts(ROW, Routing(6, 2, expert_scale=scale))[1][0]
    assert weights == pytest.approx([1.0, 1.5])


ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "shares": {"normalized": False},
    "sigmoid": {"scoring": "sigmoid", "scale": 2.5},
    "biased": {"scoring": "sigmoid", "choice_bias": True},
    "groups": {"scoring": "sigmoid", "choice_bias": True, "num_groups": 4, "num_used_groups": 2},
    "best of groups": {"num_groups": 4, "num_used_groups": 3, "group_top": 1, "normalized": False},
    "scaled": {"expert_scale": True},
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("format", ["f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0"])
def test_native_experts_are_the_specifications(name: str, format: str, gated: bool) -> None:
    """One layer of experts with fresh random weights, from one row to more than any kernel takes at once."""
    from unspool.config import EngineConfig
    from unspool.ops import Batch, ExpertWeights
    from unspool.ops.cpu import CpuOps
    from unspool.ops.reference import ReferenceOps
    from unspool.ops.storage import Storage
    from unspool.weights.weight import encode_weight

    seed = np.random.SeedSequence().entropy
    rng = np.random.default_rng(seed)
    experts, used, hidden, width, vocabulary = 16, 4, 64, 96, 50

    def weight(*shape: int, format: str = "f32") -> Any:
        return encode_weight("w", (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32), format)

    table, router = weight(vocabulary, hidden), weight(experts, hidden)
    parts_each = 2 if gated else 1
    gates = [[weight(width, hidden, format=format) for _ in range(parts_each)] for _ in range(experts)]
    downs = [[weight(hidden, width, format=format)] for _ in range(experts)]
    vectors = {key: weight(experts) for key in ("choice_bias", "expert_scale")}
    biases = weight(experts * parts_each * width), weight(experts * hidden)
    rows = 45
    ids = rng.integers(vocabulary, size=rows).astype(np.int32)
    found = []
    for ops in (ReferenceOps(), CpuOps(threads=2)):
        given = {key: ops.vector([vectors[key]]) if key in vectors else value for key, value in ROUTINGS[name].items()}
        routing = Routing(experts, used, **given)
        weights = ExpertWeights(
            gate_up=ops.experts(gates),
            down=ops.experts(downs),
            gate_up_bias=ops.vector([biases[0]]),
            down_bias=ops.vector([biases[1]]),
            activation="relu2" if not gated else "clamped_swiglu" if name == "shares" else "silu",
            gated=gated,
        )
        parts = ops.matrix([table]), ops.matrix([router]), ops.vector([encode_weight("n", np.ones(hidden, np.float32))])

        def forward(batch: Batch, kv: Any, ops: Any = ops, parts: Any = parts, routing: Any = routing,
                    weights: Any = weights) -> Any:  # fmt: skip
            x = ops.norm(ops.embed(batch, parts[0]), parts[2], 1e-6)
            return ops.take(ops.moe(x, ops.linear(x, parts[1]), routing, weights, x), batch)

        kv = ops.kv_cache([Storage()], EngineConfig(block_size=16, kv_dtype="f32"), 8)
        step = ops.compile(forward, kv)
        found.append(np.array(step.run(_batch(ids))).reshape(rows, hidden))
        alone = [np.array(step.run(_batch(ids[r : r + 1]))).reshape(hidden) for r in (0, 7, rows - 1)]
        assert np.array_equal(alone, found[-1][[0, 7, rows - 1]]), f"bits depend on other rows; seed {seed}"
    exact = format in ("f32", "bf16")
    error = np.abs(found[1] - found[0]).max() / np.abs(found[0]).std()
    assert error < (1e-4 if exact else 0.12), f"seed {seed}"


def _batch(ids: np.ndarray) -> Any:
    from unspool.ops import Batch

    rows = len(ids)
    places = np.arange(rows, dtype=np.int32)
    tables = np.arange(8, dtype=np.int32)[None]
    return Batch(ids, places, places.astype(np.int64), np.array([0, rows], np.int32), tables, places)

"""Experts on the CUDA backend: the specification's choice of experts and its sums, and bits that a row's company does
not change."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.cuda_setting import DEVICE, MARKS
from tests.ops.test_cuda_models import make_batch, make_step, tokens_of
from tests.ops.test_routing import ROUTINGS
from unspool.ops import ExpertWeights
from unspool.ops.cuda.backend import CudaOps
from unspool.ops.cuda.launch import Arena, Launch
from unspool.ops.cuda.layout import Value
from unspool.ops.cuda.lower_experts import ExpertLowering
from unspool.ops.graph import Embed, Moe
from unspool.ops.reference import ReferenceOps
from unspool.ops.routing import Routing, choose_experts
from unspool.weights.weight import Weight, encode_weight

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
EXPERTS, USED = 8, 3
FORMATS = ("bf16", "f32", "q8_0", "q4_0", "q4_1", "q5_1", "mxfp4", "fp8", "q4_k", "q6_k", "q2_k")
SORTED = ("bf16", "q8_0", "q4_1", "mxfp4", "fp8", "q2_k")  # a format of each kind of planes


class OneNode:
    """What `ExpertLowering` needs of a `Lowering`, for a node by itself."""

    def __init__(self, rows: int, slots: torch.Tensor | None = None) -> None:
        self.rows, self.arena, self.launches, self._slots = rows, Arena(DEVICE), list[Launch](), slots

    def add(self, launch: Launch) -> None:
        self.launches.append(launch)

    def release(self, *tensors: torch.Tensor) -> None:
        pass

    def row_slots(self) -> torch.Tensor | None:
        return self._slots


class Layer:
    """A layer of random experts, and what it is by the specification."""

    def __init__(self, format: str = "bf16", activation: Any = "silu", *, hidden: int = 0, width: int = 0) -> None:
        wide = format in ("fp8", "q4_k", "q6_k", "q2_k")
        self.hidden, self.width = hidden or (256 if wide else 64), width or (256 if wide else 40)
        if not wide and format not in ("bf16", "f32"):
            self.width = 96  # whole blocks
        self.rng = np.random.default_rng(np.random.SeedSequence().entropy)
        self.format, self.activation = format, activation
        self.gates = [[self.weight(self.width, self.hidden) for _ in range(2)] for _ in range(EXPERTS)]
        self.downs = [[self.weight(self.hidden, self.width)] for _ in range(EXPERTS)]
        self.biases = self.vector(EXPERTS * 2 * self.width), self.vector(EXPERTS * self.hidden)

    def weight(self, *shape: int) -> Weight:
        values = (self.rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        return encode_weight("w", values, self.format)

    def vector(self, size: int) -> Weight:
        return encode_weight("v", self.rng.standard_normal(size).astype(np.float32), "f32")

    def rows(self, count: int) -> np.ndarray:
        values = torch.from_numpy(self.rng.standard_normal((count, self.hidden)).astype(np.float32))
        return values.bfloat16().float().numpy()

    def prepared(self, ops: Any) -> ExpertWeights:
        return ExpertWeights(
            gate_up=ops.experts(self.gates),
            down=ops.experts(self.downs),
            gate_up_bias=ops.vector([self.biases[0]]),
            down_bias=ops.vector([self.biases[1]]),
            activation=self.activation,
        )


def routing_of(name: str, rng: np.random.Generator, on_card: bool) -> Routing:
    given = dict(ROUTINGS[name])
    for key in ("choice_bias", "expert_scale"):
        if given.get(key):
            values = rng.standard_normal(EXPERTS).astype(np.float32)
            given[key] = torch.from_numpy(values).to(DEVICE) if on_card else array("f", values)
    return Routing(EXPERTS, USED, **given)


def run(layer: Layer, routing: Routing, x: np.ndarray, scores: np.ndarray, ops: CudaOps) -> np.ndarray:
    """The stream x with its experts added, of rows as they are."""
    low = OneNode(len(x))
    source: Any = Embed(None, 1.0)  # type: ignore[arg-type]
    node = Moe(source, source, routing, layer.prepared(ops), source)
    halves, logits, residual = on_device(x).bfloat16(), on_device(scores), on_device(x)
    out = torch.zeros(len(x), layer.hidden, device=DEVICE)
    nothing = dict.fromkeys(("scaled", "next_weight", "next_parts"))
    ExpertLowering(low, node).launch(Value(halves), logits, residual, out, nothing)  # type: ignore[arg-type]
    for launch in low.launches:
        launch.run()
    return out.cpu().numpy()


def on_device(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(DEVICE).contiguous()


def expected(layer: Layer, routing: Routing, x: np.ndarray, scores: np.ndarray) -> np.ndarray:
    ops = ReferenceOps()
    return np.array(ops.moe(x, scores, routing, layer.prepared(ops), x))


@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_find_the_specifications_experts(name: str) -> None:
    """Also where scores are equal, and where one is not a number."""
    seed, ops = 7, CudaOps()
    scores = np.random.default_rng(seed).standard_normal((6, EXPERTS)).astype(np.float32)
    scores[1], scores[2, ::2] = 0.5, 1.25
    layer = Layer()
    x = layer.rows(len(scores))
    found = run(layer, routing_of(name, np.random.default_rng(1), True), x, scores, ops)
    wanted = expected(layer, routing_of(name, np.random.default_rng(1), False), x, scores)
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


def test_equal_scores_choose_the_lower_experts() -> None:
    chosen, _ = choose_experts(np.zeros((1, EXPERTS), np.float32), Routing(EXPERTS, USED))
    assert chosen.tolist() == [[0, 1, 2]]
    layer, scores = Layer(), np.zeros((1, EXPERTS), np.float32)
    x = layer.rows(1)
    found, same = (run(layer, Routing(EXPERTS, USED), x, each, CudaOps()) for each in (scores, scores + 1))
    assert np.array_equal(found, same)
    assert np.abs(found - expected(layer, Routing(EXPERTS, USED), x, scores)).max() < 0.02


@pytest.mark.parametrize(("format", "rows"), [*((each, 3) for each in FORMATS), *((each, 70) for each in SORTED)])
def test_experts_are_the_specifications_in_every_format(format: str, rows: int) -> None:
    """Few rows, which are multiplied as they stand, and many, which are sorted by expert."""
    layer = Layer(format, "clamped_swiglu" if format == "mxfp4" else "silu")
    x, scores = layer.rows(rows), layer.rng.standard_normal((rows, EXPERTS)).astype(np.float32)
    routing = Routing(EXPERTS, USED, normalized=False)
    found, wanted = run(layer, routing, x, scores, CudaOps()), expected(layer, routing, x, scores)
    assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)


@pytest.mark.parametrize("format", ["bf16", "q8_0", "q4_1"])
def test_a_row_does_not_depend_on_its_company(format: str) -> None:
    """Alone, in crowds of every kind of tile, and where one expert has all rows."""
    layer, routing, ops = Layer(format), Routing(EXPERTS, USED), CudaOps()
    x, scores = layer.rows(70), layer.rng.standard_normal((70, EXPERTS)).astype(np.float32)
    scores[:40] = scores[0]
    whole = run(layer, routing, x, scores, ops)
    for part in (slice(0, 1), slice(37, 43), slice(20, 70), slice(5, 22)):
        assert np.array_equal(run(layer, routing, x[part], scores[part], ops), whole[part])


def test_rows_that_only_fill_up_a_step_use_no_expert() -> None:
    layer, ops = Layer(), CudaOps()
    node: Any = Embed(None, 1.0)  # type: ignore[arg-type]
    slots = torch.tensor([4, -1, 5], dtype=torch.int32, device=DEVICE)
    low = OneNode(3, slots)
    x, scores = layer.rows(3), layer.rng.standard_normal((3, EXPERTS)).astype(np.float32)
    moe = Moe(node, node, Routing(EXPERTS, USED), layer.prepared(ops), node)
    out = torch.zeros(3, layer.hidden, device=DEVICE)
    nothing = dict.fromkeys(("scaled", "next_weight", "next_parts"))
    inputs = Value(on_device(x).bfloat16()), on_device(scores), on_device(x), out, nothing
    ExpertLowering(low, moe).launch(*inputs)  # type: ignore[arg-type]
    for launch in low.launches:
        launch.run()
    found, alone = out.cpu().numpy(), run(layer, Routing(EXPERTS, USED), x, scores, ops)
    assert np.array_equal(found[[0, 2]], alone[[0, 2]])
    assert np.array_equal(found[1], x[1])


FAMILIES = ["tiny-qwen2-moe", "tiny-qwen3-moe", "tiny-mixtral", "tiny-granite-moe", "tiny-olmoe", "tiny-gpt-oss"]


@pytest.mark.parametrize("shape", FAMILIES)
def test_a_family_with_experts_is_near_the_reference(shape: str) -> None:
    """A prompt of which the last logits are wanted, beside a decode; then a piece of which all are, alone and not."""
    tokens, founds = tokens_of(4, 40), []
    for ops in (ReferenceOps(), CudaOps()):
        step = make_step(ops, shape, "bf16", num_layers=2)
        first = step.run(make_batch([(0, tokens[:6], [3]), (0, tokens[6:9], [5])], 16, last=True)).copy()
        piece = (6, tokens[9:13], [3])
        second = step.run(make_batch([piece, (3, tokens[13:16], [5])], 16)).copy()
        alone = step.run(make_batch([piece], 16)).copy()
        if ops.name == "cuda":
            assert np.array_equal(second[:4], alone)
        founds.append(np.concatenate([first, second]))
    expected, found = founds
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)

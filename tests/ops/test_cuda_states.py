"""Recurrent layers on the CUDA backend: near the reference, and the same bits however a state was reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.cuda_setting import DEVICE, MARKS, ON_CARD
from tests.ops.test_layers import RECURRENT, run_from
from unspool.config import EngineConfig
from unspool.ops import ArrayBatch, ConvSpec, RecurrenceSpec
from unspool.ops.cuda import CudaOps, steps
from unspool.ops.cuda.lower_states import conv_launch, recurrence_launch
from unspool.ops.reference import ReferenceKV, ReferenceOps
from unspool.ops.storage import KeyValues, State, Storage, state_bytes

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

SLOTS = 6


@dataclass(frozen=True)
class Case:
    """An operation of random weights, its input's width and its state."""

    spec: Any
    width: int
    state: State
    out: int
    gates: int = 0


def conv(channels: int, taps: int, **changes: Any) -> Callable[[np.random.Generator], Case]:
    def make(rng: np.random.Generator) -> Case:
        has_bias = changes.get("activation") is not None
        spec = ConvSpec(
            0,
            "conv",
            channels,
            taps,
            normal(rng, channels * taps),
            normal(rng, channels) if has_bias else None,
            **changes,
        )
        return Case(spec, spec.least_width + 3, State("conv", (taps - 1, channels)), channels)

    return make


def recurrence(kind: Any, heads: int, key_heads: int, key: int, value: int, **changes: Any) -> Callable[..., Case]:
    def make(rng: np.random.Generator) -> Case:
        spec = RecurrenceSpec(
            kind, 0, "memory", heads, key_heads, key, value, -np.exp(normal(rng, heads)), normal(rng, heads),
            normal(rng, heads) if kind == "scan" else None, **changes,
        )  # fmt: skip
        return Case(spec, spec.row_width, State("memory", (heads, key, value)), heads * value, spec.gates_width)

    return make


CASES = {
    "a convolution": conv(20, 4, activation="silu", start=5),
    "a gated convolution": conv(136, 3, start=272, before=0, after=136),
    "a delta rule": recurrence("delta", 4, 2, 12, 10, tiled=True),
    "a wide delta rule": recurrence("delta", 2, 1, 32, 24),
    "a scan": recurrence("scan", 6, 2, 8, 20),
}


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def batch_of(sequences: Sequence[tuple[int, int, int, dict[int, int]]]) -> ArrayBatch:
    """Sequences as (first position, rows, state, saves by row of the sequence)."""
    counts = [count for _, count, _, _ in sequences]
    saves = [own.get(row, -1) for _, count, _, own in sequences for row in range(count)]
    none = np.zeros(0, np.int32)
    return ArrayBatch(
        ids=np.zeros(sum(counts), np.int32),
        positions=np.concatenate([np.arange(at, at + count) for at, count, _, _ in sequences]).astype(np.int32),
        slots=none,
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        tables=none.reshape(0, 0),
        logit_rows=none,
        states=np.array([state for _, _, state, _ in sequences], np.int32),
        saves=np.array(saves, np.int32),
    )


def device_rows(case: Case, batch: ArrayBatch, x: np.ndarray, gates: np.ndarray, states: torch.Tensor) -> np.ndarray:
    """The operation on the device; `states` are changed in place."""
    CudaOps()
    live, rows = len(x), steps.padded(len(x) + 1)
    step = np.zeros(steps.HEADER + 2 * rows + steps.SEQUENCE * len(batch.states), np.int32)
    step[steps.STATES : steps.STATES + 2] = steps.HEADER, len(batch.states)
    steps.write_states(step[steps.HEADER :], batch, rows)

    def sent(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(DEVICE)

    padded = [sent(np.pad(each, ((0, rows - live), (0, 0)), constant_values=np.nan)) for each in (x, gates)]
    vectors = {
        name: sent(np.asarray(value).reshape(-1))
        for name in ("weight", "rate", "bias", "skip")
        if (value := getattr(case.spec, name, None)) is not None
    }
    spec, out = replace(case.spec, **vectors), torch.full((rows, case.out), float("nan"), device=DEVICE)
    if isinstance(spec, ConvSpec):
        conv_launch(spec, padded[0], states, out, sent(step), rows).run()
    else:
        recurrence_launch(spec, *padded, states, out, sent(step), rows).run()
    return out.cpu().numpy()[:live]


def reference_rows(case: Case, batch: ArrayBatch, x: np.ndarray, gates: np.ndarray, states: np.ndarray) -> np.ndarray:
    kv = ReferenceKV([Storage(states=(case.state,))], EngineConfig().with_device_defaults("reference"), 1, SLOTS)
    kv.states[0, case.state.name] = states
    if isinstance(case.spec, ConvSpec):
        return ReferenceOps().short_conv(x, case.spec, batch, kv)
    return ReferenceOps().recurrence(x, gates, case.spec, batch, kv)


def inputs(case: Case, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    return normal(rng, rows, case.width), normal(rng, rows, max(case.gates, 1))


@pytest.mark.parametrize("name", CASES)
def test_rows_and_states_are_those_of_the_reference(name: str) -> None:
    """A sequence that begins, one that goes on, a single token; one saves its state twice."""
    rng = np.random.default_rng()
    case = CASES[name](rng)
    batch = batch_of([(0, 7, 3, {1: 4, 5: 0}), (9, 2, 1, {}), (4, 1, 5, {})])
    x, gates = inputs(case, rng, 10)
    states = normal(rng, SLOTS, *case.state.shape)
    on_device = torch.from_numpy(states.copy()).to(DEVICE)
    found = device_rows(case, batch, x, gates, on_device)
    expected = reference_rows(case, batch, x, gates, states)
    for one, other in ((found, expected), (on_device.cpu().numpy(), states)):
        assert np.isfinite(one).all()
        assert np.linalg.norm(one - other) < 1e-5 * np.linalg.norm(other)
    assert np.array_equal(on_device[2].cpu().numpy(), states[2]), "a slot of nobody's is left alone"


@pytest.mark.parametrize("name", CASES)
def test_alone_in_a_crowd_and_in_pieces_give_the_same_bits(name: str) -> None:
    rng = np.random.default_rng()
    case = CASES[name](rng)
    x, gates = inputs(case, rng, 9)
    others = inputs(case, rng, 5)
    before = torch.from_numpy(normal(rng, SLOTS, *case.state.shape)).to(DEVICE)
    alone, crowd, pieces = before.clone(), before.clone(), before.clone()
    whole = device_rows(case, batch_of([(0, 9, 2, {3: 4})]), x, gates, alone)
    together = batch_of([(2, 3, 5, {}), (0, 9, 0, {}), (0, 2, 1, {})])
    mixed = [np.concatenate([other[:3], own, other[3:]]) for own, other in zip((x, gates), others, strict=True)]
    assert np.array_equal(device_rows(case, together, *mixed, crowd)[3:12], whole)
    assert torch.equal(crowd[0], alone[2])
    found, at = [], 0
    for count in (1, 3, 4, 1):
        own = slice(at, at + count)
        found.append(device_rows(case, batch_of([(at, count, 3, {})]), x[own], gates[own], pieces))
        at += count
        if at == 4:
            assert torch.equal(pieces[3], alone[4]), "what was saved on the way is the state of who stopped there"
    assert np.array_equal(np.concatenate(found), whole)
    assert torch.equal(pieces[3], alone[2])


def test_slots_are_cleared_copied_saved_and_restored() -> None:
    states = (State("conv", (3, 8)), State("memory", (2, 5, 7)))
    layers = (
        Storage(states=states),
        Storage(KeyValues(2, 16, 16)),
        Storage(KeyValues(1, 24, 16, latent=True), states[:1]),
    )
    kv = CudaOps().kv_cache(layers, EngineConfig(block_size=16).with_device_defaults("cuda"), 2, num_states=3)
    assert kv.state_bytes == state_bytes(layers) == 4 * (24 + 70 + 24)
    assert kv.block_bytes[0] == 2 * 16 * (2 * 2 * 16 + 24), "of latent layers, whole keys alone"
    data = np.random.default_rng().standard_normal(kv.state_bytes // 4).astype(np.float32).tobytes()
    kv.write_state(1, data)
    kv.copy_state(1, 2)
    kv.clear_state(1)
    assert kv.read_state(2) == data
    assert kv.read_state(1) == kv.read_state(0) == bytes(kv.state_bytes)
    assert kv.state(2, "conv")[2].cpu().numpy().tobytes() in data


@pytest.mark.parametrize("name", RECURRENT if ON_CARD else ["delta nets with joint gates", "scans"])
def test_a_saved_state_is_where_a_sequence_goes_on(name: str) -> None:
    ops = CudaOps()
    straight = run_from(ops, name, [(0, 6, 3, {})])
    resumed = run_from(ops, name, [(0, 6, 0, {3: 2}), (4, 2, 2, {})])
    assert np.array_equal(resumed, np.concatenate([straight, straight[4:]]))

"""Whole models of every family, native against reference; and what a program does with steps that cannot be run."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.ops.conftest import distance, make_batch
from unspool.config import EngineConfig, ModelConfig
from unspool.errors import BackendError, EngineError
from unspool.models.checkpoint import Checkpoint
from unspool.models.expert_config import ExpertConfig
from unspool.models.random import random_checkpoint
from unspool.models.registry import architecture_of, build
from unspool.models.shapes import EVERY_FAMILY, SHAPES
from unspool.ops import Batch, KVCache, Ops, Step
from unspool.ops.cpu import CpuOps
from unspool.ops.reference import ReferenceOps
from unspool.ops.storage import Storage
from unspool.weights.weight import encode_weight

FAMILIES = ["tiny-untied", *EVERY_FAMILY]
WITH_EXPERTS = [name for name in EVERY_FAMILY if isinstance(SHAPES[name], ExpertConfig)]


def compiled(ops: Ops, checkpoint: Checkpoint, engine: EngineConfig) -> Step:
    model = build(checkpoint.config, checkpoint.weights, ops)
    return ops.compile(model, ops.kv_cache(architecture_of(checkpoint.config).storage, engine, 40, num_states=8))


def with_ids(batch: Batch, ids: np.ndarray) -> Batch:
    return replace(batch, ids=ids.astype(np.int32))


# Rounding may choose other experts: test_routing.py compares formats of experts for a given choice.
FORMATS = [(family, "f32") for family in FAMILIES] + [(each, "q8_0") for each in FAMILIES if each not in WITH_EXPERTS]


# A short convolution multiplies three rows that were rounded. Tiny Phi amplifies rounding a bit more (0.0304).
ROUNDED = defaultdict(lambda: 0.03, {"tiny-lfm2": 0.05, "tiny-phi3": 0.04})


@pytest.mark.parametrize(("family", "format"), FORMATS)
def test_families_agree_with_the_reference(
    isa: str, family: str, format: str, tiny: Callable[[str, str], Checkpoint]
) -> None:
    checkpoint, engine = tiny(family, format), EngineConfig(kv_dtype="f32").with_device_defaults("cpu")
    ids = np.random.default_rng(1).integers(0, 256, 60)
    ours = compiled(CpuOps(threads=2, isa=isa), checkpoint, engine)
    theirs = compiled(ReferenceOps(), checkpoint, engine)
    for start, end in ((0, 45), (45, 46), (46, 60)):
        batch = with_ids(make_batch([(start, end - start, [3, 7])], 32), ids[start:end])
        assert distance(np.array(ours.run(batch)), theirs.run(batch)) < (1e-5 if format == "f32" else ROUNDED[family])


@pytest.mark.parametrize("family", [*FAMILIES, "tiny-wide"])
def test_bits_do_not_depend_on_company_or_pieces(isa: str, family: str, tiny: Callable[[str, str], Checkpoint]) -> None:
    checkpoint = tiny(family, "q4_k" if family == "tiny-wide" else "q4_0")
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 256, 100)
    whole = None
    for threads in (1, 2):
        step = compiled(CpuOps(threads=threads, isa=isa), checkpoint, EngineConfig(block_size=16))
        y = np.array(step.run(with_ids(make_batch([(0, 100, range(7))], 16), ids)))
        whole = y if whole is None else whole
        assert np.array_equal(y, whole)
        start = 0
        for count in (30, 1, 1, 3, 50, 15):
            others = rng.integers(0, 256, 9)
            batch = make_batch([(0, 4, [20]), (start, count, range(7, 14)), (0, 5, [30])], 16, range(4, 4 + count))
            y = step.run(with_ids(batch, np.concatenate([others[:4], ids[start : start + count], others[4:]])))
            assert np.array_equal(y, whole[start : start + count])
            start += count


THREE_HEADS = replace(SHAPES["tiny"], num_heads=9, num_kv_heads=3, head_dim=32, rope_dim=32)


@pytest.mark.parametrize("shape", [SHAPES["tiny"], SHAPES["tiny-gemma3"], THREE_HEADS], ids=["two", "one", "three"])
@pytest.mark.parametrize("threads", [2, 3, 9])
def test_threads_that_come_late_do_no_harm(shape: ModelConfig, threads: int) -> None:
    """More threads than cores: many find their work done by others, or rows written over. Key heads that do not go
    round are shared by threads."""
    checkpoint = random_checkpoint(shape, format="q8_0")
    ids = np.random.default_rng(3).integers(0, 256, 64)
    alone = compiled(CpuOps(threads=1), checkpoint, EngineConfig().with_device_defaults("cpu"))
    crowd = compiled(CpuOps(threads=threads), checkpoint, EngineConfig().with_device_defaults("cpu"))
    for position in range(64):
        batch = with_ids(make_batch([(position, 1, [1, 2])], 32), ids[position : position + 1])
        assert np.array_equal(crowd.run(batch), alone.run(batch))


MANY_WEIGHTS = replace(SHAPES["tiny"], num_layers=1, intermediate_size=12288)  # more than stay in the cache at once


@pytest.mark.parametrize(
    ("shape", "format"),
    [
        (SHAPES["tiny"], "q4_1"),
        (SHAPES["tiny-gemma3"], "q4_1"),
        (SHAPES["tiny-wide"], "q4_k"),
        (MANY_WEIGHTS, "q4_1"),
        (MANY_WEIGHTS, "f16"),
    ],
    ids=["tiny", "gemma3", "wide", "many", "many-f16"],
)
def test_parts_of_many_rows_make_no_difference(isa: str, shape: ModelConfig, format: str) -> None:
    """From 256 rows on threads keep rows of their own; here two sequences cut across them."""
    checkpoint = random_checkpoint(shape, format=format)
    rows = make_batch([(0, 333, range(11)), (5, 190, range(11, 18))], 32)
    seen = with_ids(make_batch([(0, 5, range(11, 18))], 32), np.arange(5))
    ids = np.random.default_rng(3).integers(0, 256, 523)
    whole = None
    for threads in (1, 2, 3, 4):
        step = compiled(CpuOps(threads=threads, isa=isa), checkpoint, EngineConfig().with_device_defaults("cpu"))
        step.run(seen)
        y = np.array(step.run(with_ids(rows, ids)))
        whole = y if whole is None else whole
        assert np.array_equal(y, whole)


def test_only_wanted_rows_have_logits(isa: str, tiny: Callable[[str, str], Checkpoint]) -> None:
    checkpoint = tiny("tiny", "q8_0")
    step = compiled(CpuOps(threads=2, isa=isa), checkpoint, EngineConfig().with_device_defaults("cpu"))
    ids = np.arange(50)
    everything = np.array(step.run(with_ids(make_batch([(0, 50, [0, 1])], 32), ids)))
    for rows in ([49], [3, 2, 49], []):
        some = step.run(with_ids(make_batch([(0, 50, [0, 1])], 32, rows), ids))
        assert np.array_equal(some, everything[rows])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": np.array([0, 320])}, "token id 320 is outside the vocabulary of 320"),
        ({"ids": np.array([0, -1])}, "token id -1"),
        ({"slots": np.array([0, 40 * 32])}, "slot 1280 is outside the cache's 1280"),
        ({"slots": np.array([-1, 0])}, "slot -1"),
        ({"tables": np.array([[40]])}, "block 40 is outside the cache's 40"),
        ({"tables": np.array([[-7]])}, "block -7"),
        ({"positions": np.array([0, 32])}, "position 32 is past the end of a table of blocks: 1"),
        ({"positions": np.array([-1, 0])}, "position -1"),
        ({"logit_rows": np.array([2])}, "logit row 2 is outside the step's 2"),
        ({"logit_rows": np.array([-1])}, "logit row -1"),
        ({"starts": np.array([0, 1])}, "starts do not cover the rows"),
        ({"starts": np.array([1, 2])}, "starts do not cover the rows"),
        ({"starts": np.array([0, 2, 2]), "tables": np.array([[0], [0]])}, "has no rows"),
        ({"starts": np.array([0, 1, 2])}, "differ in their number of sequences"),
        ({"positions": np.array([0])}, "differ in length"),
        (
            {"ids": np.zeros(0), "positions": np.zeros(0), "slots": np.zeros(0), "starts": np.array([0, 0])},
            "at least one row",
        ),
    ],
)
def test_steps_that_cannot_be_run_are_refused(
    changes: dict[str, np.ndarray], message: str, tiny: Callable[[str, str], Checkpoint]
) -> None:
    step = compiled(CpuOps(threads=1), tiny("tiny", "q8_0"), EngineConfig().with_device_defaults("cpu"))
    batch = make_batch([(0, 2, [0])], 32)
    step.run(batch)
    with pytest.raises(EngineError, match=message):
        step.run(replace(batch, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"states": np.array([8])}, "state 8 is outside the cache's 8"),
        ({"states": np.array([-1])}, "state -1"),
        ({"states": np.array([], np.int32)}, "a state for each of 1 sequences is needed, not 0"),
        ({"saves": np.array([8, -1])}, "state 8 is outside the cache's 8"),
        ({"saves": np.array([1])}, "saves of 1 rows; the step has 2"),
    ],
)
def test_states_that_are_not_there_are_refused(
    changes: dict[str, np.ndarray], message: str, tiny: Callable[[str, str], Checkpoint]
) -> None:
    step = compiled(CpuOps(threads=1), tiny("tiny-lfm2", "q8_0"), EngineConfig().with_device_defaults("cpu"))
    batch = make_batch([(0, 2, [0])], 32)
    step.run(batch)
    with pytest.raises(EngineError, match=message):
        step.run(replace(batch, **changes))


def test_an_instruction_set_that_is_not_there() -> None:
    with pytest.raises(BackendError, match="unknown kernel set 'sse9'"):
        CpuOps(isa="sse9")


def test_engines_share_threads(tiny: Callable[[str, str], Checkpoint]) -> None:
    before = len(os.listdir("/proc/self/task"))
    many = [CpuOps(threads=3) for _ in range(5)]
    assert len(os.listdir("/proc/self/task")) <= before + 2
    batch = make_batch([(0, 20, [0])], 32)
    engine = EngineConfig().with_device_defaults("cpu")
    answers = [np.array(compiled(ops, tiny("tiny", "q8_0"), engine).run(batch)) for ops in many]
    assert all(np.array_equal(answer, answers[0]) for answer in answers)


def test_a_forked_child_has_threads_of_its_own(tiny: Callable[[str, str], Checkpoint]) -> None:
    step = compiled(CpuOps(threads=2), tiny("tiny", "q8_0"), EngineConfig().with_device_defaults("cpu"))
    batch = make_batch([(0, 20, [0])], 32)
    wanted = np.array(step.run(batch))
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(step.run(batch), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(step.run(batch), wanted)


@pytest.mark.parametrize("family", ["tiny-qwen3", "tiny-qwen3.5", "tiny-glm4-moe", "tiny-gemma4"])
def test_rows_that_are_kept_change_no_logits(isa: str, family: str, tiny: Callable[[str, str], Checkpoint]) -> None:
    """A step that also tells its hidden rows, of all tokens: the same bits, and the rows that the head reads."""
    checkpoint, engine = tiny(family, "q4_0"), EngineConfig(block_size=16, kv_dtype="f32")
    ops = CpuOps(threads=2, isa=isa)
    model = build(checkpoint.config, checkpoint.weights, ops)

    def step_of(forward: Callable[..., object]) -> Step:
        return ops.compile(forward, ops.kv_cache(model.architecture.storage, engine, 40, num_states=8))

    plain, keeping, hidden = step_of(model), step_of(model.with_hidden), step_of(model.hidden)
    ids = np.random.default_rng(4).integers(0, 256, 60)
    for start, end in ((0, 57), (57, 58), (58, 60)):
        batch = with_ids(make_batch([(start, end - start, range(4))], 16), ids[start:end])
        every = replace(batch, logit_rows=np.arange(end - start, dtype=np.int32))
        assert np.array_equal(np.array(keeping.run(batch)), np.array(plain.run(batch)))
        assert np.array_equal(np.array(keeping.kept()), np.array(hidden.run(every)))
    assert len(np.array(plain.kept())) == 0


def test_given_rows_are_read_as_they_are(isa: str) -> None:
    ops = CpuOps(threads=2, isa=isa)

    def forward(batch: Batch, kv: KVCache) -> object:
        rows = ops.given(batch, 24)
        return ops.multiply(rows, rows)

    kv = ops.kv_cache([Storage()], EngineConfig(block_size=16), 4)
    step = ops.compile(forward, kv)
    rows = np.random.default_rng(5).standard_normal((9, 24), np.float32)
    batch = make_batch([(0, 5, [0]), (3, 4, [1])], 16)
    assert np.array_equal(np.array(step.run(replace(batch, given=rows.reshape(-1)))), rows * rows)
    with pytest.raises(EngineError, match="given rows have 0 values; the step needs 216"):
        step.run(batch)
    table = ops.matrix([encode_weight("ones", np.ones((256, 32), np.float32))])
    plain = ops.compile(lambda batch, kv: ops.embed(batch, table), kv)
    with pytest.raises(EngineError, match="given rows have 24 values; the step needs 0"):
        plain.run(replace(make_batch([(0, 1, [0])], 16), given=rows[0]))

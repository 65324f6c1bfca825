"""What a plain answer on the CPU does without numpy gives what numpy would have given, and needs none of it."""

from __future__ import annotations

import hashlib
import math
import os
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.config import RopeScaling
from unspool.digest import blake2b, sha256
from unspool.engine.batch import BatchBuilder
from unspool.lazy import lazy
from unspool.models.checkpoint import SAMPLE_BYTES, SAMPLES, sample_places
from unspool.models.random import SHAPES, write_random_gguf
from unspool.models.rotary import Rotary
from unspool.plan import Plan, Work
from unspool.weights.gguf import shortest


def in_a_fresh_process(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ANSWER = """
import sys
from unspool import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", threads=2)
params = SamplingParams(max_tokens=40, seed=1, **eval(sys.argv[2]))
print(llm.generate([5, 6, 7] * 20, params).token_ids)
print(*sorted({"numpy", "hashlib", "tokenizers", "jinja2", "subprocess"} & set(sys.modules)))
"""


@pytest.mark.parametrize("sampling", ["{'temperature': 0}", "{'temperature': 0.8, 'top_p': 0.9, 'top_k': 40}"])
def test_a_plain_answer_needs_no_numpy(tmp_path: Path, sampling: str) -> None:
    pytest.importorskip("unspool._native")
    write_random_gguf(tmp_path / "tiny.gguf", SHAPES["tiny"])
    plain, *needed = in_a_fresh_process(ANSWER, str(tmp_path / "tiny.gguf"), sampling).splitlines()
    assert not needed
    first = f"import numpy\n{ANSWER}"  # whoever has it anyway gets the same
    assert in_a_fresh_process(first, str(tmp_path / "tiny.gguf"), sampling).splitlines()[0] == plain


def test_an_import_on_demand() -> None:
    code = """
import os, sys
from unspool.lazy import np, limit_blas_threads
assert "numpy" not in sys.modules
limit_blas_threads()
assert np.arange(3).sum() == 3 and np.ndarray is sys.modules["numpy"].ndarray
print(os.environ.get("OPENBLAS_NUM_THREADS"))
"""
    assert in_a_fresh_process(code) == str(os.environ.get("OPENBLAS_NUM_THREADS"))
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        lazy("math").nothing_of_this_name  # noqa: B018


def test_an_import_that_ctrl_c_interrupts_is_whole(tmp_path: Path) -> None:
    """As numpy's extension modules do, this one refuses to be imported twice."""
    (tmp_path / "once.py").write_text(
        "import os, signal, sys, time\n"
        "assert not hasattr(sys, 'was_imported'), 'cannot load module more than once'\n"
        "sys.was_imported = True\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "for _ in range(50): time.sleep(0.002)\n"
        "value = 3\n"
    )
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from unspool.lazy import lazy
once = lazy("once")
try:
    once.value
except KeyboardInterrupt:
    print(once.value)
"""
    assert in_a_fresh_process(code, str(tmp_path)) == "3"


@st.composite
def works(draw: st.DrawFn) -> tuple[Plan, int]:
    """Decodes and pieces of prompts of some requests, in blocks of their own."""
    size = draw(st.sampled_from([1, 4, 16, 32]))
    made = []
    for number in range(draw(st.integers(1, 4))):
        start, rows = draw(st.integers(0, 100)), draw(st.sampled_from([1, 1, 2, 7, 50]))
        needed = -(-(start + rows) // size)
        blocks = draw(st.permutations(range(needed + 3)))[: draw(st.integers(needed, needed + 3))]
        tokens = tuple(draw(st.lists(st.integers(0, 1 << 20), min_size=rows, max_size=rows)))
        num_logits = draw(st.sampled_from([0, 1, rows]))
        saves = tuple((at, 10 + at) for at in sorted(draw(st.sets(st.integers(0, rows - 1), max_size=2))))
        state = draw(st.integers(-1, 8))
        made.append(Work(number, start, tokens, tuple(blocks), num_logits, min(num_logits, 1), state, saves))
    return Plan(tuple(made)), size


def expected_batch(plan: Plan, size: int) -> dict[str, list[int]]:
    """As Batch says, row by row."""
    rows = [(work, place) for work in plan.works for place in range(len(work.tokens))]
    width = max(len(work.blocks) for work in plan.works)
    positions = [work.start + place for work, place in rows]
    return {
        "ids": [work.tokens[place] for work, place in rows],
        "positions": positions,
        "slots": [w.blocks[at // size] * size + at % size for (w, _), at in zip(rows, positions, strict=True)],
        "starts": [0, *np.cumsum([len(work.tokens) for work in plan.works]).tolist()],
        "tables": [[*work.blocks, *[0] * (width - len(work.blocks))] for work in plan.works],
        "logit_rows": [r for r, (work, at) in enumerate(rows) if at >= len(work.tokens) - work.num_logits],
        "states": [9 if work.state < 0 else work.state for work in plan.works],
        "saves": [dict(work.saves).get(at, -1) for work, at in rows] if any(w.saves for w in plan.works) else [],
        "given": [],
    }


@given(st.lists(works(), min_size=1, max_size=3))
def test_a_batch_is_what_its_plan_says(given: list[tuple[Plan, int]]) -> None:
    """One after the other, so that nothing of an earlier one is kept that is not true any more."""
    size = given[0][1]
    builder = BatchBuilder(size, unkept_state=9)
    for plan in (plan for plan, other in given if other == size):
        for _ in range(2):
            batch = builder.build(plan).arrays()
            assert {name: value.tolist() for name, value in vars(batch).items()} == expected_batch(plan, size)
            assert batch.slots.dtype == np.int64
            others = {value.dtype for name, value in vars(batch).items() if name not in ("slots", "given")}
            assert others == {np.dtype(np.int32)}


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_number_as_its_author_wrote_it(value: float) -> None:
    found = shortest(value)
    assert struct.pack("<f", found) == struct.pack("<f", value)
    digits = len(repr(found).split("e")[0].replace("-", "").replace(".", "").strip("0"))
    theirs = len(f"{np.float32(value):}".split("e")[0].replace("-", "").replace(".", "").strip("0"))
    assert digits <= max(theirs, 1) + 1, "as short as numpy's, or one longer at a power of two"


@pytest.mark.parametrize("value", [1e-5, 1e-6, 1e6, 0.1, 10_000.0, 448.0, 3.4028235e38, 1.1754944e-38, 0.0])
def test_numbers_of_real_files(value: float) -> None:
    read = struct.unpack("<f", struct.pack("<f", value))[0]
    assert shortest(read) == value == float(str(np.float32(value)))


@given(st.integers(SAMPLES * SAMPLE_BYTES + 1, 1 << 40))
def test_samples_lie_where_they_always_lay(nbytes: int) -> None:
    """A fingerprint is kept in files: it must not change."""
    assert sample_places(nbytes) == np.linspace(0, nbytes - SAMPLE_BYTES, SAMPLES).astype(np.int64).tolist()


@given(st.binary(max_size=300))
def test_hashes_are_hashlibs(data: bytes) -> None:
    assert sha256(data).hexdigest() == hashlib.sha256(data).hexdigest()
    assert blake2b(data, digest_size=16).digest() == hashlib.blake2b(data, digest_size=16).digest()


def speeds(rotary: Rotary, factors: np.ndarray | None) -> np.ndarray:
    """The formulas over whole arrays."""
    half, scaling, theta = rotary.dim // 2, rotary.scaling, rotary.theta
    speed = 1.0 / theta ** (np.arange(half, dtype=np.float64) * 2 / rotary.dim)
    speed = speed if factors is None else speed / factors
    if scaling is None:
        return speed
    if scaling.kind == "linear":
        return speed / scaling.factor
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / speed
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = (scaling.original_context / wavelength - low) / (high - low)
        blended = (1 - smooth) * speed / scaling.factor + smooth * speed
        is_long, is_short = wavelength > scaling.original_context / low, wavelength < scaling.original_context / high
        return np.where(is_long, speed / scaling.factor, np.where(is_short, speed, blended))
    turns = [half * math.log(scaling.original_context / (t * 2 * math.pi)) / math.log(theta) for t in (32.0, 1.0)]
    first, last = max(0.0, math.floor(turns[0])), min(half - 1.0, math.ceil(turns[1]))
    ramp = np.clip((np.arange(half) - first) / max(last - first, 0.001), 0, 1)
    return speed / scaling.factor * ramp + speed * (1 - ramp)


@pytest.mark.parametrize("kind", [None, "linear", "llama3", "yarn"])
@pytest.mark.parametrize("theta", [10_000.0, 100_000.0, 500_000.0, 1_000_000.0])
def test_rotations_are_those_of_the_formulas(kind: str | None, theta: float) -> None:
    scaling = None if kind is None else RopeScaling(kind, 8.0, original_context=8192)  # type: ignore[arg-type]
    for dim in (64, 128, 256):
        rotary = Rotary(dim, theta, "half", scaling)
        for factors in (None, np.linspace(1, 9, dim // 2, dtype=np.float32)):
            rope = rotary.rope(None if factors is None else array("f", factors))
            assert np.asarray(rope.inv_freq).tolist() == speeds(rotary, factors).astype(np.float32).tolist()

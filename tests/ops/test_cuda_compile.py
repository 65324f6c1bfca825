"""Every kernel compiles for a card. Triton's own compiler needs none to do so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ops.cuda_setting import ON_CARD

pytestmark = pytest.mark.skipif(ON_CARD, reason="a card's own tests compile them")
SCRIPT = Path(__file__).parent / "compile_for_card.py"
SAMPLING = {"prepare", "coarse", "gather", "search", "draw", "logprobs"}
CASES = {
    "tiny": [("tiny-wide", format) for format in ("bf16", "fp8", "q4_1", "q8_0", "q2_k")],
    "real": [("llama-8b", "bf16"), ("llama-1b", "fp8"), ("llama-1b", "q4_1")],
    "experts of a real model": [("olmoe-1b-7b", "bf16"), ("olmoe-1b-7b", "q4_k")],
    "odd": [("gemma3-270m", "bf16"), ("smollm2-135m", "q8_0")],
}
VARIANTS = {"layers": 100, "experts": 50}  # sets of kernels, and how many there are at least


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process for each case, all at once: a kernel compiles on one core."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[2])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = {
        name: subprocess.Popen([sys.executable, str(SCRIPT), json.dumps(cases)], env=environment, text=True, **pipes)
        for name, cases in (CASES | {name: name for name in VARIANTS}).items()
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def result_of(compiler: subprocess.Popen[str]) -> dict[str, int]:
    out, errors = compiler.communicate()
    assert compiler.returncode == 0, errors[-4000:]
    found: dict[str, int] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_for_hopper(name: str, compilers: dict[str, subprocess.Popen[str]]) -> None:
    reported = result_of(compilers[name])
    assert set(reported) >= SAMPLING | {"attention", "attention-prompt"}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_that_the_interpreter_runs_is_read_by_the_compiler(
    name: str, compilers: dict[str, subprocess.Popen[str]]
) -> None:
    assert result_of(compilers[name])["variants"] > VARIANTS[name]

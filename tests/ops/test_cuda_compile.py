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
SAMPLING = {"prepare", "coarse", "gather", "search", "draw", "tell"}
CASES = {
    "tiny": [("tiny-wide", format) for format in ("bf16", "fp8", "q4_1", "q8_0", "q2_k")],
    "real": [("llama-8b", "bf16"), ("llama-1b", "fp8"), ("llama-1b", "q4_1")],
    "odd": [("gemma3-270m", "bf16"), ("smollm2-135m", "q8_0")],
}


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process for each case, all at once: a kernel compiles on one core."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = {
        name: subprocess.Popen([sys.executable, str(SCRIPT), json.dumps(cases)], env=environment, text=True, **pipes)
        for name, cases in CASES.items()
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_for_hopper(name: str, compilers: dict[str, subprocess.Popen[str]]) -> None:
    out, errors = compilers[name].communicate()
    assert compilers[name].returncode == 0, errors[-4000:]
    told = json.loads(out.splitlines()[-1])
    assert set(told) >= SAMPLING | {"attention", "attention-prompt"}

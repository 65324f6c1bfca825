"""Every kernel compiles for a card. Triton's own compiler needs none to do so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.cuda_setting import ON_CARD

pytestmark = pytest.mark.skipif(ON_CARD, reason="a card's own tests compile them")
SCRIPT = Path(__file__).parent / "compile_for_card.py"
SAMPLING = {"prepare", "coarse", "gather", "search", "draw", "tell"}


@pytest.mark.parametrize(
    "cases",
    [
        [("tiny-wide", format) for format in ("bf16", "fp8", "q4_1", "q8_0", "q2_k")],
        [("llama-8b", "bf16"), ("llama-1b", "fp8"), ("llama-1b", "q4_1")],
        [("gemma3-270m", "bf16"), ("smollm2-135m", "q8_0")],
    ],
    ids=["tiny", "real", "odd"],
)
def test_kernels_compile_for_hopper(cases: list[tuple[str, str]]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(cases)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert set(told) >= SAMPLING | {"attention", "attention-prompt"}

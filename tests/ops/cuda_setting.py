"""Where the CUDA body's tests run: on a card where there is one, else under Triton's interpreter on the CPU.

Import this before anything of unspool.ops.cuda: whether kernels are interpreted is settled when they are defined.
"""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="the CUDA body needs torch")
ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="the CUDA body needs triton")
MARKS = [pytest.mark.gpu] if ON_CARD else []
DEVICE = torch.device("cuda" if ON_CARD else "cpu")

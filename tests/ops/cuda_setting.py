"""Where the CUDA backend's tests run: on a card where there is one, else under Triton's interpreter on the CPU.

Import this before anything of unspool.ops.cuda: whether kernels are interpreted is settled when they are defined.
`make test` installs torch and triton (the `interpreter` extra), so a missing one is an error, not a reason to skip.
"""

from __future__ import annotations

import os
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("triton is made for Linux alone", allow_module_level=True)
try:
    import torch
except ImportError as error:
    raise ImportError("the CUDA backend's tests need torch and triton: pip install unspool[interpreter]") from error
ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"
MARKS = [pytest.mark.gpu] if ON_CARD else []
DEVICE = torch.device("cuda" if ON_CARD else "cpu")

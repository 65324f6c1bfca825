"""The native CPU backend: weights stay quantized, a model is recorded once, and each step is one native call."""

from __future__ import annotations

from unspool.ops.cpu.backend import CpuOps
from unspool.ops.cpu.kv import CpuKV

__all__ = ["CpuKV", "CpuOps"]

"""The native CPU body: weights stay quantized, a model is recorded once, and each step is one native call."""

from __future__ import annotations

from unspool.ops.cpu.body import CpuKV, CpuOps

__all__ = ["CpuKV", "CpuOps"]

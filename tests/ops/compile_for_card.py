"""Compile the kernels of some steps for a Hopper card, where there is none: run by test_cuda_compile.py.

Under the interpreter a kernel is Python, which forgives what a compiler does not: a name that changes its shape, a type
that does not fit, more shared memory than there is.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from unspool.config import EngineConfig
from unspool.models.random import SHAPES, shared_checkpoint
from unspool.models.registry import architecture_of, build
from unspool.ops.cuda import attention, launch, lower, project, runner, sampler
from unspool.ops.cuda.body import CudaOps
from unspool.ops.cuda.linear import linear_kernel, linear_many_kernel
from unspool.ops.cuda.quantized import quantized_kernel
from unspool.ops.cuda.sampler import SamplingRoom, results_room

SHARED_MEMORY = 232_448  # bytes that a program may have on Hopper
SHARED_ALL = 233_472  # that a multiprocessor has, with 1 KiB for each program


class NoCard:
    """What Triton asks a driver for before it compiles."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend() -> None:
    driver.set_active(NoCard())
    for module in (launch, lower, project, runner, sampler, attention):
        for name, value in (("multiprocessors", 132), ("has_dependent_launch", True), ("has_room_for_all", True)):
            if hasattr(module, name):
                setattr(module, name, lambda value=value: value)
    torch.cuda.Stream = lambda: None  # type: ignore[assignment,misc]


def launches_of(shape: str, format: str) -> list[Any]:
    config = SHAPES[shape]
    if config.num_layers > 4:  # a real model: its widths are what counts
        config = replace(config, num_layers=2, vocab_size=4096)
    checkpoint = shared_checkpoint(config, format)
    ops = object.__new__(CudaOps)
    ops.device = torch.device("cpu")
    engine = EngineConfig(block_size=128, step_tokens=512, kv_tokens=1024).with_device_defaults("cuda")
    kv = ops.kv_cache(architecture_of(checkpoint.config).storage, engine, 8)
    step = ops.compile(build(checkpoint.config, checkpoint.weights, ops), kv)
    step._room, step._results = SamplingRoom(64, step.vocab_size, ops.device), results_room(64, runner.RING, ops.device)
    parts: list[Any] = [("all", 1, 1, (True, True)), ("all", 8, 8, None), ("all", 48, 48, (False, False))]
    parts += [("all", 128, 128, None), ("body", 300, 16, None), ("tail", 300, 16, None)]
    return [each for part in parts for each in step._layout(*part)[0].launches]


def held_once(text: str) -> bool:
    """Whether no value that a program hands over is held by two threads: its layout covers no more than the tensor."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.[^\n]*)", text, re.MULTILINE))
    stores = re.findall(r"st\.relaxed.*-> tensor<(\d+)x(\d+)x\w+, (#\w+)>", text)
    for rows, columns, name in stores:
        numbers = {key: json.loads(value) for key, value in re.findall(r"(\w+) = (\[[\d, ]*\])", layouts[name])}
        if "nvidia_mma" in layouts[name]:  # of 16 rows a warp
            covered = [16 * numbers["warpsPerCTA"][0], numbers["instrShape"][1] * numbers["warpsPerCTA"][1]]
        elif "blocked" in layouts[name]:
            sizes = (numbers["sizePerThread"], numbers["threadsPerWarp"], numbers["warpsPerCTA"])
            covered = [math.prod(each) for each in zip(*sizes, strict=True)]
        else:
            return False
        if covered[0] > int(rows) or covered[1] > int(columns):
            return False
    return len(stores) >= 3


def main(cases: list[list[str]]) -> None:
    pretend()
    told: dict[str, int] = {}
    for shape, format in cases:
        for each in launches_of(shape, format):
            compiled = each.kernel.warmup(grid=each.grid, **each.arguments, **each.options)
            assert compiled.metadata.shared <= SHARED_MEMORY, f"{each.label} asks for {compiled.metadata.shared} bytes"
            if each.kernel in (linear_kernel, linear_many_kernel):  # one product after the other would take much longer
                products, waits = (compiled.asm["sass"].count(name) for name in ("HGMMA", "WARPGROUP.DEPBAR"))
                assert waits < products, f"{each.label}: {waits} waits for {products} products"
            if each.kernel is quantized_kernel and each.args["NEAR"]:  # or the order is not what decode.py says
                widths = set(re.findall(r"kWidth = (\d)", compiled.asm["ttgir"]))
                assert widths == {"4"}, f"{each.label}: a thread's neighbours in a product are {widths}, not 4"
            if each.label == "attention":  # whoever merges waits for others: all programs must have room
                fit = SHARED_ALL // (compiled.metadata.shared + 1024)
                assert each.grid[0] <= 132 * fit, f"{fit} programs a multiprocessor, not {each.grid[0] / 132:g}"
                assert held_once(compiled.asm["ttgir"]), "a value that is handed over is stored twice"
                assert each.registers * 128 * (each.grid[0] // 132) <= 65_536
            told[each.label] = max(told.get(each.label, 0), compiled.metadata.shared)
    print(json.dumps(told))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

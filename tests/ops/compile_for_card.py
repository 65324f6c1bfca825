"""Compile the kernels of some steps for a Hopper card, where there is none: run by test_cuda_compile.py.

    compile_for_card.py '[["tiny-wide", "bf16"], …]'   the kernels of models of random weights
    compile_for_card.py '"layers"'                     every variant of a kernel that the interpreter's tests use
    compile_for_card.py '"experts"'                    experts of every kind of weights

Under the interpreter a kernel is Python, which forgives what a compiler does not: a name that changes its shape, a type
that does not fit, more shared memory than there is.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.ops.test_layers import GEOMETRIES, MODELS, OTHER_MODELS, WHOLE, architecture, random_weights
from unspool.config import EngineConfig
from unspool.models.decoder import Decoder
from unspool.models.random import SHAPES, random_checkpoint, shared_checkpoint
from unspool.models.registry import build
from unspool.models.shapes import EVERY_FAMILY, TINY
from unspool.models.tensors import TensorReader
from unspool.ops import ExpertWeights
from unspool.ops.cuda import attention, latent, launch, lower, lower_latent, lower_states, project, runner, sampler
from unspool.ops.cuda.backend import CudaOps
from unspool.ops.cuda.device_experts import make_experts
from unspool.ops.cuda.experts import expert_kernel
from unspool.ops.cuda.layout import Value
from unspool.ops.cuda.linear import linear_kernel, linear_many_kernel
from unspool.ops.cuda.lower_experts import ExpertLowering
from unspool.ops.cuda.quantized import quantized_kernel
from unspool.ops.cuda.sampler import SamplingRoom, results_room
from unspool.ops.graph import Embed, Moe
from unspool.ops.routing import Routing
from unspool.weights.weight import encode_weight

CPU = torch.device("cpu")
SHARED_MEMORY = 232_448  # bytes that a program may have on Hopper
LARGE = (
    linear_kernel, linear_many_kernel, quantized_kernel, expert_kernel,
    attention.decode_attention_kernel, attention.prompt_attention_kernel,
    latent.latent_attention_kernel, latent.head_products_kernel,
)  # fmt: skip
PROMPT: list[Any] = [("body", 300, 16, None), ("tail", 300, 16, None)]
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
    for module in (launch, lower, lower_latent, lower_states, project, runner, sampler, attention):
        for name, value in (("multiprocessors", 132), ("has_dependent_launch", True), ("has_room_for_all", True)):
            if hasattr(module, name):
                setattr(module, name, lambda value=value: value)
    torch.cuda.Stream = lambda: None  # type: ignore[assignment,misc]


def launches_of(shape: str, format: str) -> list[Any]:
    config = SHAPES[shape]
    if config.num_layers > 4:  # a real model: its widths are what counts
        config = replace(config, num_layers=2, vocab_size=4096)
    checkpoint = shared_checkpoint(config, format)
    parts = [("all", 1, 1, (True, True)), ("all", 8, 8, None), ("all", 48, 48, (False, False)), ("all", 128, 128, None)]
    ops = card_ops()
    return laid_out(ops, build(checkpoint.config, checkpoint.weights, ops), [*parts, *PROMPT], block_size=128)


def card_ops() -> CudaOps:
    ops = object.__new__(CudaOps)
    ops.device = torch.device("cpu")
    return ops


def laid_out(ops: CudaOps, model: Any, parts: list[Any], block_size: int) -> list[Any]:
    engine = EngineConfig(block_size=block_size, step_tokens=512, kv_tokens=1024).with_device_defaults("cuda")
    step = ops.compile(model, ops.kv_cache(model.architecture.storage, engine, 8))
    step._room, step._results = SamplingRoom(64, step.vocab_size, ops.device), results_room(64, runner.RING, ops.device)
    return [each for part in parts for each in step._layout(*part)[0].launches]


def expert_launches() -> Iterator[tuple[str, Any]]:
    """A layer of experts by itself, of every kind of planes, for one row, some, and so many that they are sorted."""
    rng, count, size = np.random.default_rng(0), 8, 256
    routing = Routing(count, 2, "sigmoid", choice_bias=torch.zeros(count), num_groups=4, num_used_groups=2)
    source: Any = Embed(None, 1.0)  # type: ignore[arg-type]
    nothing = dict.fromkeys(("scaled", "next_weight", "next_parts"))
    for format, activation in (("bf16", "silu"), ("fp8", "silu"), ("q4_k", "gelu_tanh"), ("mxfp4", "clamped_swiglu"),
                               ("q3_k", "silu"), ("q2_k", "silu"), ("q5_1", "silu")):  # fmt: skip
        part = encode_weight("w", rng.standard_normal((size, size)).astype(np.float32), format)
        gate_up, down = make_experts([[part, part]] * count, CPU), make_experts([[part]] * count, CPU)
        bias = None if activation == "silu" else torch.zeros(count * 2 * size)
        node = Moe(source, source, routing, ExpertWeights(gate_up, down, activation, bias, None), source)
        for rows in (1, 24, 64, 300):
            low = OneNode(rows)
            x = Value(torch.zeros((max(rows, 16), size), dtype=torch.bfloat16), torch.zeros(4, rows), 1e-6)
            stream = torch.zeros(rows, size)
            ExpertLowering(low, node).launch(x, torch.zeros(rows, count), stream, stream, nothing)
            yield from ((f"experts {format} {rows}", each) for each in low.launches)


class OneNode:
    """What `ExpertLowering` needs of a `Lowering`."""

    def __init__(self, rows: int) -> None:
        self.rows, self.arena, self.launches = rows, launch.Arena(CPU), list[Any]()

    def add(self, one: Any) -> None:
        self.launches.append(one)

    def release(self, *tensors: Any) -> None:
        pass

    def row_slots(self) -> torch.Tensor:
        return torch.zeros(self.rows, dtype=torch.int32)


def variants() -> Iterator[tuple[str, Any]]:
    """The launches of every model that the interpreter's tests run, and the model's name."""
    models = MODELS | OTHER_MODELS
    for name in (*models, *WHOLE):  # of tests/ops/test_layers.py
        model = architecture(GEOMETRIES, **WHOLE[name]) if name in WHOLE else architecture(models[name])
        ops = card_ops()
        decoder = Decoder(TINY, model, TensorReader(ops, random_weights(model, seed=1, format="bf16")))
        yield from ((name, each) for each in laid_out(ops, decoder, [("all", 2, 2, None), *PROMPT], block_size=16))
    cases = [(shape, "bf16") for shape in EVERY_FAMILY] + [("tiny-wide", format) for format in ("q3_k", "q5_1")]
    for shape, format in cases:
        checkpoint, ops = random_checkpoint(SHAPES[shape], format=format), card_ops()
        decoder = build(checkpoint.config, checkpoint.weights, ops)
        yield from ((shape, each) for each in laid_out(ops, decoder, [("all", 2, 2, None), *PROMPT], block_size=16))


class FrontEndDone(Exception):
    """The compiler has read a kernel and is about to make machine code of it."""


def compile_variants(launches: Iterator[tuple[str, Any]], read_only: tuple[Any, ...]) -> None:
    """Small kernels are compiled to the end. Large ones take seconds each, and other cases compile them to the end:
    here the compiler only reads every variant of theirs, and checks names, shapes and types."""
    make_code = CUDABackend.__dict__["make_ttgir"]

    @staticmethod
    def stop(*args: Any) -> Any:
        raise FrontEndDone

    seen: set[str] = set()
    for name, each in launches:
        arguments = {key: described(value) for key, value in {**each.arguments, **each.options}.items()}
        variant = f"{each.kernel.fn.__name__}{arguments}"
        if variant in seen:
            continue
        seen.add(variant)
        CUDABackend.make_ttgir = stop if each.kernel in read_only else make_code
        try:
            compiled = each.kernel.warmup(grid=each.grid, **each.arguments, **each.options)
            assert compiled.metadata.shared <= SHARED_MEMORY, f"{each.label} asks for {compiled.metadata.shared} bytes"
            if each.kernel is expert_kernel and each.args["T"] == 16 and each.args["FORMAT"] != "bf16":
                check_neighbours(each.label, compiled.asm["ttgir"])
        except FrontEndDone:
            pass
        except Exception as error:
            raise RuntimeError(f"{name}: {each.label} ({each.kernel.fn.__name__}) does not compile") from error
    print(json.dumps({"variants": len(seen)}))


def described(value: Any) -> Any:
    """What a compiled kernel depends on of an argument."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if isinstance(value, TensorDescriptor):
        return str(value.base.dtype), tuple(value.block_shape)
    return (value == 1, value % 16 == 0) if type(value) is int and value > 1 << 12 else value


def check_neighbours(label: str, text: str) -> None:
    widths = set(re.findall(r"kWidth = (\d)", text))
    assert widths == {"4"}, f"{label}: a thread's neighbours in a product are {widths}, not 4"


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
    reported: dict[str, int] = {}
    for shape, format in cases:
        for each in launches_of(shape, format):
            compiled = each.kernel.warmup(grid=each.grid, **each.arguments, **each.options)
            assert compiled.metadata.shared <= SHARED_MEMORY, f"{each.label} asks for {compiled.metadata.shared} bytes"
            if each.kernel in (linear_kernel, linear_many_kernel):  # one product after the other would take much longer
                products, waits = (compiled.asm["sass"].count(name) for name in ("HGMMA", "WARPGROUP.DEPBAR"))
                assert waits < products, f"{each.label}: {waits} waits for {products} products"
            if each.kernel is quantized_kernel and each.args["NEAR"]:  # or the order is not what decode.py says
                check_neighbours(each.label, compiled.asm["ttgir"])
            if each.label == "attention":  # whoever merges waits for others: all programs must have room
                fit = SHARED_ALL // (compiled.metadata.shared + 1024)
                assert each.grid[0] <= 132 * fit, f"{fit} programs a multiprocessor, not {each.grid[0] / 132:g}"
                assert held_once(compiled.asm["ttgir"]), "a value that is handed over is stored twice"
                assert each.registers * 128 * (each.grid[0] // 132) <= 65_536
            reported[each.label] = max(reported.get(each.label, 0), compiled.metadata.shared)
    print(json.dumps(reported))


if __name__ == "__main__":
    pretend()
    asked = json.loads(sys.argv[1])
    if asked == "layers":
        compile_variants(variants(), LARGE)
    elif asked == "experts":
        compile_variants(expert_launches(), ())
    else:
        main(asked)

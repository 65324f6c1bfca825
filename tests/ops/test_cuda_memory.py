"""What a GPU's memory is planned for, and what is said where a GPU, its software or its memory is missing."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.ops.cuda_setting import ON_CARD, torch
from unspool.cli import main
from unspool.config import EngineConfig
from unspool.engine.sizing import KvSizes
from unspool.errors import BackendError
from unspool.models.random import SHAPES, shared_checkpoint, stand_in
from unspool.models.registry import architecture_of, build
from unspool.ops import cuda
from unspool.ops.cuda import backend, memory
from unspool.ops.cuda.matrix import make_matrix
from unspool.ops.cuda.runner import bucket_of
from unspool.ops.storage import kv_bytes_per_token

CPU = torch.device("cpu")
ENGINE = EngineConfig(device="cuda").with_device_defaults("cuda")


WIDE = [("tiny-wide", format) for format in ("bf16", "fp8", "q8_0", "q4_1", "q5_1", "q6_k", "q2_k")]


@pytest.mark.parametrize(("shape", "format"), [*WIDE, ("smollm2-135m", "q4_1"), ("smollm2-135m", "q8_0")])
def test_weights_take_what_was_planned(shape: str, format: str) -> None:
    """Widths of 576, too, which are no whole tiles of four bits."""
    checkpoint = shared_checkpoint(replace(SHAPES[shape], num_layers=1, vocab_size=300), format)
    for weight in checkpoint.weights.values():
        if len(weight.shape) == 2:
            planned = memory.weight_bytes([weight])
            assert make_matrix([weight], CPU).nbytes == planned, weight.name


@pytest.mark.parametrize("shape", ["llama-1b", "gemma3-270m"])
def test_a_step_takes_no_more_than_was_planned(shape: str) -> None:
    """Whatever sizes came before it, a limit that is no power of two; and no more for more layers: what is between two
    of them has served when the next is done."""
    taken = []
    for layers in (2, 5):
        config = replace(SHAPES[shape], num_layers=layers, vocab_size=256, intermediate_size=2048)
        ops = object.__new__(backend.CudaOps)
        ops.device = CPU
        engine = EngineConfig(block_size=128, step_tokens=520, max_running=16, kv_tokens=1024)
        engine = engine.with_device_defaults("cuda")
        checkpoint = shared_checkpoint(config, "bf16")
        model = build(config, checkpoint.weights, ops)
        step = ops.compile(model, ops.kv_cache(model.architecture.storage, engine, 8))
        for rows in sorted({bucket_of(rows) for rows in range(1, 521)}):  # each larger than those before
            for part in ("body", "tail") + ("all",) * (rows <= 16):
                step._layout(part, rows, min(rows, 16), None)
        left = sum(each.numel() * each.element_size() for each in (step._shared.stream, step._shared.queries))
        taken.append(step._arena.nbytes + left)
    assert taken[0] == taken[1]
    assert taken[0] <= memory.workspace_bytes(architecture_of(config).widths, engine) - memory.FIXED


def test_the_cache_gets_what_is_left() -> None:
    model, architecture = SHAPES["llama-8b"], architecture_of(SHAPES["llama-8b"])
    total = 141 << 30
    free = total - memory.weight_bytes(stand_in("llama-8b").weights.values())
    room = memory.kv_room(free, total, architecture.widths, ENGINE)
    assert room + memory.workspace_bytes(architecture.widths, ENGINE) + (total - free) == int(0.9 * total)
    [blocks] = KvSizes(architecture.storage, model.context_length, ENGINE, keys_alone=True).blocks(room)
    assert blocks == room // kv_bytes_per_token(architecture.storage, "f16") // ENGINE.block_size
    small = SHAPES["tiny"]
    most = 256 * small.context_length
    [blocks] = KvSizes(architecture_of(small).storage, small.context_length, ENGINE, keys_alone=True).blocks(room)
    assert blocks * ENGINE.block_size == most, "no more than can be used"


def test_no_room_is_told_with_its_numbers() -> None:
    with pytest.raises(BackendError, match=r"the GPU has 16\.0 GiB, of which 15\.0 are taken.* allows 90% of it"):
        memory.kv_room(1 << 30, 16 << 30, architecture_of(SHAPES["llama-8b"]).widths, ENGINE)


def test_an_engine_asks_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = object.__new__(backend.CudaOps)
    monkeypatch.setattr(backend, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 << 30, 80 << 30))
    widths = architecture_of(SHAPES["llama-1b"]).widths
    assert ops.kv_room(widths, ENGINE) == memory.kv_room(60 << 30, 80 << 30, widths, ENGINE)


@pytest.mark.parametrize("module", ["torch", "triton"])
def test_missing_software_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendError, match=rf"needs {module}, which cannot be imported.*pip install 'unspool\[cuda\]'"):
        cuda.__getattr__("CudaOps")


@pytest.mark.parametrize("version", ["3.6.0", "3.10.0+git", "4.0"])
def test_new_software_will_do(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["triton"], "__version__", version)
    assert cuda.__getattr__("CudaOps") is backend.CudaOps


@pytest.mark.parametrize("version", ["3.5.1", "2.9"])
def test_old_software_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["triton"], "__version__", version)
    with pytest.raises(BackendError, match=rf"needs triton 3\.6 or later, and {version} is installed.*--upgrade"):
        cuda.__getattr__("CudaOps")


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match=r"no NVIDIA GPU: the driver is missing or too old \(run nvidia-smi\)"):
        backend.check_device()


@pytest.mark.parametrize("name", ["gpu", "kernels"])
def test_a_benchmark_says_that_there_is_no_card(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", name]) == 1
    assert "torch sees no NVIDIA GPU" in capsys.readouterr().err


def test_an_old_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "An Old Card")
    with pytest.raises(BackendError, match=r"An Old Card has compute capability 8\.6; .* need 9\.0"):
        backend.check_device()


def test_memory_that_is_full_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backend, "make_matrix", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 29, 16 << 30))
    ops = object.__new__(backend.CudaOps)
    ops.device = CPU
    with pytest.raises(BackendError, match=r"full at output.weight: 0\.5 of 16\.0 GiB are free; `unspool plan"):
        ops.matrix([shared_checkpoint(SHAPES["tiny-untied"]).weights["output.weight"]])


def test_a_plan_for_a_gpu_that_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--random", "llama-8b", "--gpu-size", "141GiB", "--gpu-bandwidth", "4.4TB/s", "--json"]
    assert main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["free_bytes"] == 141 << 30
    assert plan["fits"]
    assert 800_000 < plan["kv_tokens"] < 900_000
    assert math.isclose(plan["decode_floor"]["seconds_per_token"], plan["step_bytes"] / 4.4e12)
    small = ["plan", "--random", "llama-8b", "--gpu-size", "16GB"]
    assert main(small) == 0  # it is a plan, if one of what does not go
    output = capsys.readouterr().out
    assert "they do not fit together\n" in output
    assert "nothing is left for a KV cache" in output
    assert main([*small, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["fits"], plan["kv_tokens"]) == (False, 0)
    assert "use a smaller or quantized model" in plan["problem"]
    assert main(["plan", "--random", "llama-8b", "--gpu-size", "many"]) == 2
    assert "'many' is not a size, as in 141GiB or 80GB" in capsys.readouterr().err


@pytest.mark.skipif(ON_CARD, reason="there is a GPU to plan for")
def test_a_plan_for_a_gpu_that_is_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--random", "llama-8b", "--device", "cuda"]) != 0


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("llama-9b", "there is no shape 'llama-9b'"), ("llama-8b:q9", "unknown format 'q9'"), ("tiny:q4_k", "64 wide")],
)
def test_random_weights_that_cannot_be(spec: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--random", spec, "hello"]) == 2
    assert expected in capsys.readouterr().err


def test_random_weights_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--random", "tiny:q8_0", "--json", "-n", "4", "--ignore-eos", "--seed", "1", "hello"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 4

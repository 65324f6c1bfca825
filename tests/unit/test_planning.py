"""Plans for hardware that is not here: well-known figures, experts that are used, and what is not known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.schemas import validate
from unspool.cli import main
from unspool.config import EngineConfig
from unspool.hardware import HARDWARE, find_hardware
from unspool.models.costs import ExpertLayer, step_costs
from unspool.models.random import SHAPES, outline, random_checkpoint, shared_checkpoint
from unspool.planning import Planner, Target

Capture = pytest.CaptureFixture[str]


def planned(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    reported: dict[str, Any] = validate("plan", json.loads(capsys.readouterr().out))
    return reported


# The figures that everyone quotes round the parameters to 70 and 7 billion and count the embedding table, of which a
# step reads one row a token. Hence the tolerances.
def test_llama_2_70b_on_an_h100(capsys: Capture) -> None:
    plan = planned(capsys, "--random", "llama2-70b:f16", "--on", "H100 SXM")
    assert plan["parameters"] == 68_976_648_192
    assert plan["step_bytes"] == pytest.approx(140e9, rel=0.025)
    assert plan["bandwidth"]["bytes_per_second"] == 3.35e12
    assert plan["decode_floor"]["seconds_per_token"] == pytest.approx(0.042, rel=0.025)
    assert plan["fits"] is False
    assert "use a smaller or quantized model" in plan["problem"]
    assert plan["users"] is None


def test_a_7b_model_on_an_a10(capsys: Capture) -> None:
    plan = planned(capsys, "--random", "llama2-7b:f16", "--on", "A10")
    assert plan["weight_bytes"] == pytest.approx(14e9, rel=0.04)
    assert plan["bandwidth"]["bytes_per_second"] == 600e9
    assert plan["decode_floor"]["seconds_per_token"] == pytest.approx(0.023, rel=0.06)
    assert plan["compute_bound_batch"]["0"] == pytest.approx(125e12 / 600e9, rel=0.01)
    assert plan["prefill_floor"]["bound"] == "compute"
    assert plan["users"]["at_once"] == plan["requests"]["1024"] == 6


def test_the_cache_of_a_70b_model(capsys: Capture) -> None:
    plan = planned(capsys, "--random", "llama-70b", "--on", "h200", "--kv-dtype", "f16")
    assert 4096 * plan["kv_bytes_per_token"] == 1_342_177_280  # 1.34 GB


def test_experts_count_as_far_as_they_are_used(capsys: Capture) -> None:
    plan = planned(capsys, "--random", "qwen3-30b-a3b:bf16", "--on", "m3-ultra")
    assert plan["parameters"] == pytest.approx(30.5e9, rel=0.01)
    assert plan["step_bytes"] == pytest.approx(2 * 3.0e9, rel=0.1)  # "A3B"
    mixtral = planned(capsys, "--random", "mixtral-8x7b:bf16", "--on", "h200")
    assert mixtral["parameters"] == pytest.approx(46.7e9, rel=0.01)
    assert mixtral["step_bytes"] == pytest.approx(2 * 12.9e9, rel=0.03)


def test_more_rows_use_more_experts_and_never_more_than_there_are() -> None:
    layer = ExpertLayer(800.0, 8, 2)
    assert layer.read(1) == 200
    assert layer.read(2) == 350
    assert 799 < layer.read(64) < 800


def test_costs_of_a_small_model_by_hand() -> None:
    config = SHAPES["tiny"]
    costs = step_costs(config, random_checkpoint(config).weights.values(), kv_bytes=256)
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96
    assert costs.row_flops == 2 * 2 * layer
    assert costs.head_flops == 2 * 320 * 64
    assert costs.weight_bytes() == 4 * (2 * layer + 320 * 64 + 64 + 2 * 2 * 64)
    assert costs.cache_bytes(10) == 2560
    assert costs.decode_flops(10) - costs.decode_flops(0) == 10 * 2 * (2 * 4 * 32)
    assert costs.prefill_flops(3) == 3 * costs.row_flops + costs.head_flops + 6 * 2 * (2 * 4 * 32)
    assert costs.prefill_flops(2, 1) + costs.prefill_flops(1) == costs.prefill_flops(3) + costs.head_flops


def test_windows_bound_what_is_read() -> None:
    config = SHAPES["tiny-gemma3"]
    costs = step_costs(config, random_checkpoint(config).weights.values(), kv_bytes=1000)
    windows = {span.window for span in costs.spans}
    assert None in windows
    assert len(windows) == 2
    far, farther = costs.cache_bytes(10_000), costs.cache_bytes(20_000)
    assert farther - far < 10_000 * 1000


@pytest.mark.parametrize("shape", [name for name in SHAPES if not name.startswith("tiny")])
def test_every_real_shape_has_a_plan(shape: str, capsys: Capture) -> None:
    plan = planned(capsys, "--random", shape, "--on", "h200")
    assert 0 < plan["step_bytes"] <= plan["weight_bytes"]


@pytest.mark.parametrize("name", HARDWARE)
def test_every_machine_has_a_plan(name: str, capsys: Capture) -> None:
    plan = planned(capsys, "--random", "llama-8b:q4_k", "--on", name)
    assert plan["fits"] is True
    assert plan["users"]["at_once"] >= 1
    assert HARDWARE[name].source


def test_a_batch_just_below_the_bound_is_limited_by_memory() -> None:
    checkpoint, found = outline("llama-8b"), find_hardware("h100")
    target = Target("a card", "cuda", 80 << 30, 80 << 30, found.bandwidth, "", found.compute, "")
    planner = Planner("x", checkpoint.config, checkpoint.weights, EngineConfig(), target)
    batch = planner.compute_bound_batch(0)
    assert batch is not None
    below, at = planner.decode_floor(0, batch - 1), planner.decode_floor(0, batch)
    assert below is not None
    assert at is not None
    assert (below.bound, at.bound) == ("memory", "compute")


def test_what_is_not_known_is_null(capsys: Capture) -> None:
    plan = planned(capsys, "--random", "llama-1b", "--gpu-size", "80GB")
    assert plan["bandwidth"] is plan["compute"] is plan["decode_floor"] is plan["users"] is None


def test_names_of_hardware(capsys: Capture) -> None:
    assert find_hardware("NVIDIA H100_SXM") is HARDWARE["h100"]
    assert find_hardware("RTX 4090") is HARDWARE["rtx-4090"]
    assert main(["plan", "--random", "tiny", "--on", "h101"]) == 2
    assert "did you mean 'h100'?" in capsys.readouterr().err
    assert main(["plan", "--on", "list"]) == 0
    assert "NVIDIA A10 datasheet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--on", "h100", "--gpu-size", "80GB"], "give one"),
        (["--memory", "80GB"], "--memory is of the hardware that --on names"),
        (["--on", "h100", "--tokens", "0"], "--tokens is 0"),
    ],
)
def test_what_does_not_go_together(arguments: list[str], said: str, capsys: Capture) -> None:
    assert main(["plan", "--random", "tiny", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_small_memory_is_no_traceback(capsys: Capture) -> None:
    plan = planned(capsys, "--random", "llama-8b", "--on", "m1", "--memory", "8GB")
    assert plan["fits"] is False
    assert "the weights alone take 16.1 GB of 8.0 GB" in plan["problem"]


def test_a_gpu_keeps_latents_once(capsys: Capture) -> None:
    """A latent layer's values are the last channels of its keys: the CUDA backend keeps the keys alone."""
    plan = planned(capsys, "--random", "deepseek-v2-lite", "--on", "h200")
    assert plan["kv_bytes_per_token"] == 27 * 576 * 2
    assert main(["plan", "--random", "deepseek-v2-lite", "--on", "h200"]) == 0
    assert "27 layers · 1 KV heads · 576 · 2 bytes" in capsys.readouterr().out


def test_layers_with_a_window_have_a_line_of_their_own(capsys: Capture) -> None:
    asked = ["--random", "gpt-oss-20b:mxfp4", "--on", "ddr5", "--kv-tokens", "131072"]
    plan, alone = planned(capsys, *asked), planned(capsys, *asked, "--max-running", "1")
    [window] = plan["windows"]
    per_token = plan["kv_bytes_per_token"]
    assert (window["num_layers"], window["window"], window["held_tokens"]) == (12, 128, 256)
    assert window["kv_bytes"] == window["kv_tokens"] * window["kv_bytes_per_token"]
    assert plan["kv_bytes"] == 131_072 * per_token // 2 + window["kv_bytes"] < 0.7 * 131_072 * per_token
    assert alone["windows"][0]["kv_tokens"] == 768 < window["kv_tokens"]
    assert main(["plan", *asked]) == 0
    assert "windows       12 layers see 128 tokens and keep at most 256 of a sequence" in capsys.readouterr().out
    assert planned(capsys, "--random", "llama-8b")["windows"] == []


def test_states_of_random_models_fade() -> None:
    """A rate of decay above zero would make a state grow without end."""
    for name in ("tiny-qwen3.5", "tiny-granite-hybrid"):
        for checkpoint in (random_checkpoint(SHAPES[name]), shared_checkpoint(SHAPES[name])):
            rates = [each.dequantize() for key, each in checkpoint.weights.items() if key.endswith(".ssm_a")]
            assert rates
            assert all((rate < 0).all() for rate in rates)

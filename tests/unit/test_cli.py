"""The frame of the command line: dispatch, errors, exit statuses, and the commands that load no model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.schemas import validate
from unspool.cli import COMMANDS, main, serve
from unspool.cli.bench import benchmarks
from unspool.cli.served import model_specs
from unspool.cli.terminal import ProgressBar, harmless, human_bytes, human_number, human_seconds
from unspool.errors import EngineError
from unspool.version import VERSION

Capture = pytest.CaptureFixture[str]


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"unspool {VERSION}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: Capture) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: unspool {command}" in capsys.readouterr().out
    assert main(["help", command]) == 0


@pytest.mark.parametrize(
    ("argument", "hint"),
    [("serv", "did you mean 'serve'?"), ("xyzzy", "the commands are run, chat"), ("Why is it?", "unspool run PROMPT")],
)
def test_an_unknown_command_is_named(argument: str, hint: str, capsys: Capture) -> None:
    assert main([argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"unspool: {argument!r} is not a command")
    assert hint in error


def test_python_dash_m(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "unspool", "--version"], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, f"unspool {VERSION}\n")


# Failures ----------------------------------------------------------------------------------------------------------
def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(argv: object) -> int:
        raise error

    monkeypatch.setattr("unspool.cli.pull.main", raising)


def test_a_failure_of_the_engine_is_one_line_and_status_1(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    fail_with(EngineError("the step failed"), monkeypatch)
    assert main(["pull"]) == 1
    assert capsys.readouterr().err == "unspool: the step failed\n"


def test_an_error_of_the_system_names_the_file(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    fail_with(PermissionError(13, "Permission denied", "/some/file"), monkeypatch)
    assert main(["pull"]) == 1
    assert capsys.readouterr().err == "unspool: /some/file: Permission denied\n"


def test_a_defect_says_so_and_how_to_see_more(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    fail_with(ZeroDivisionError("division by zero"), monkeypatch)
    assert main(["pull"]) == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError: division by zero" in error
    assert "--debug" in error
    with pytest.raises(ZeroDivisionError):
        main(["pull", "--debug"])


@pytest.mark.parametrize(("error", "said"), [(MemoryError(), "memory;"), (MemoryError("9 GB"), "memory (9 GB);")])
def test_too_little_memory_is_no_defect(
    error: MemoryError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    fail_with(error, monkeypatch)
    assert main(["pull"]) == 1
    assert capsys.readouterr().err.startswith(f"unspool: out of {said} unspool plan MODEL says what a model needs")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ("smollm2",)),
        (["--random", "tiny"], ("random-tiny-bf16",)),
        (["-m", "org/name"], ("org/name",)),
        (["-m", "org/name", "--name", "a"], ("a", "org/name")),
        (["-m", "org/name", "--name", "org/name"], ("org/name",)),
        (["--random", "tiny", "--name", "a", "--name", "b"], ("a", "b", "random-tiny-bf16")),
    ],
)
def test_a_served_model_has_the_name_that_was_asked_for(arguments: list[str], names: tuple[str, ...]) -> None:
    """Random weights were asked for by no model's name, least of all the default's."""
    [spec] = model_specs(serve.make_parser().parse_args(arguments), {})
    assert spec.names == names


def test_ctrl_c_before_anything_is_130(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    fail_with(KeyboardInterrupt(), monkeypatch)
    assert main(["pull"]) == 130
    assert "Traceback" not in capsys.readouterr().err


# Small commands ----------------------------------------------------------------------------------------------------
def test_pull_of_a_file_prints_its_path(chat_model: str, capsys: Capture) -> None:
    assert main(["pull", chat_model]) == 0
    assert capsys.readouterr().out == chat_model + "\n"


def test_pull_of_nothing(capsys: Capture) -> None:
    assert main(["pull", "./missing.gguf"]) == 2
    assert "./missing.gguf does not exist" in capsys.readouterr().err


def test_models_lists_what_is_in_the_cache(
    own_cache: Path, chat_model: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert main(["models"]) == 0
    assert "no model is here" in capsys.readouterr().err
    own_cache.mkdir(parents=True)
    (own_cache / "other.gguf").write_bytes(Path(chat_model).read_bytes())
    hub = own_cache.parent / "huggingface/hub/models--org--name/snapshots/1234"
    hub.mkdir(parents=True)
    (hub / "config.json").write_text("{}")
    (hub / "model.safetensors").write_bytes(b"12345678")
    assert main(["models", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in models] == [str(own_cache / "other.gguf"), "org/name"]
    assert models[1]["bytes"] == 8
    assert main(["models"]) == 0
    assert "org/name" in capsys.readouterr().out


def test_bench_lists_and_dispatches(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert {"bandwidth", "startup"} <= set(benchmarks())
    assert all(benchmarks().values()), "a benchmark's docstring begins with a line that says what it measures"
    assert main(["bench"]) == 0
    assert "startup" in capsys.readouterr().out
    assert main(["bench", "nothing"]) == 2
    seen: list[object] = []
    monkeypatch.setattr("unspool.bench.startup.main", seen.append)
    assert main(["bench", "startup", "--rounds", "2"]) == 0
    assert seen == [["--rounds", "2"]]


def test_bandwidth_ends_with_json(capsys: Capture) -> None:
    from unspool.bench import bandwidth
    from unspool.machine import measure_bandwidth

    found = measure_bandwidth(1, seconds=0, array_bytes=1 << 20)
    assert found.bytes_per_second > 0
    assert "1 thread," in found.how
    bandwidth.main(["--threads", "1", "--seconds", "0"])
    reported = validate("bench", json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert reported["gb_per_second"]["1"] > 0


def test_plan_states_the_formula(chat_model: str, capsys: Capture) -> None:
    assert main(["plan", chat_model, "--kv-tokens", "2048"]) == 0
    out = capsys.readouterr().out
    formula = "2 layers · 2 KV heads · (a key of 20, a value of 16, 4 for the scale of each)"
    assert f"176 bytes a token = {formula}" in out
    assert "room for 2,048 tokens" in out
    assert "decode floor" in out
    assert main(["plan", chat_model, "--kv-dtype", "f16"]) == 0
    assert "256 bytes a token = 2 · 2 layers · 2 KV heads · 16 · 2 bytes" in capsys.readouterr().out


def test_plan_in_json(short_model: str, base_model: str, capsys: Capture) -> None:
    assert main(["plan", short_model, "--kv-tokens", "256", "--kv-dtype", "q8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["kv_bytes_per_token"] == 2 * 2 * (12 + 2 * 4 + 16 + 4 + 4)  # a quarter of a key has 16 bits
    assert plan["requests"] == {"96": 2}
    assert plan["step_bytes"] == plan["weight_bytes"] == sum(plan["weight_formats"].values())
    floor = plan["decode_floor"]["seconds_per_token"]
    assert floor == pytest.approx(plan["step_bytes"] / plan["bandwidth"]["bytes_per_second"])
    assert plan["fits"] is True


def test_plan_counts_what_8_bit_floats_take_on_a_cpu(capsys: Capture) -> None:
    plans = {}
    for shape in ("tiny-wide:fp8", "tiny-wide:bf16"):
        assert main(["plan", "--random", shape, "--json", "--kv-tokens", "256", "--device", "cpu"]) == 0
        plans[shape] = json.loads(capsys.readouterr().out)
    fp8, bf16 = plans.values()
    assert fp8["weight_bytes"] == bf16["weight_bytes"]
    assert fp8["step_bytes"] == bf16["step_bytes"]
    assert fp8["weight_formats"]["fp8 as bf16"] == bf16["weight_formats"]["bf16"]


def test_plan_refuses_what_an_engine_would(chat_model: str, capsys: Capture) -> None:
    assert main(["plan", chat_model, "--kv-dtype", "f8"]) == 2
    assert "--kv-dtype is 'f8'; allowed: auto, q8, f16, f32" in capsys.readouterr().err
    assert main(["plan", chat_model, "--kv-tokens", "0"]) == 2
    assert "kv_tokens is 0" in capsys.readouterr().err


# Terminal ----------------------------------------------------------------------------------------------------------
def test_a_model_cannot_command_the_terminal() -> None:
    assert harmless("a\033[2Jb\x9b\a\n\tc") == "a\\x1b[2Jb\\x9b\\x07\n\tc"
    assert harmless("Ünïcödé 🙂") == "Ünïcödé 🙂"


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.00 kB"), (96_576_768, "96.6 MB"), (999_999, "1.00 MB"),
     (2.5e15, "2,500 TB")],
)  # fmt: skip
def test_human_bytes(count: float, expected: str) -> None:
    assert human_bytes(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1.01833, "1.02 s"), (0.99951, "1.00 s"), (0.0016, "1.60 ms"), (0.1234, "123 ms"), (4e-5, "40.0 µs")],
)
def test_human_seconds(seconds: float, expected: str) -> None:
    assert human_seconds(seconds) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0.98200, "0.982"), (1.0, "1.00"), (12.54, "12.5"), (626.1, "626"), (12345.6, "12,346")]
)
def test_human_number(value: float, expected: str) -> None:
    assert human_number(value) == expected


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_and_elsewhere() -> None:
    now = iter(range(100))
    screen, log = Screen(), io.StringIO()
    for stream in (screen, log):
        bar = ProgressBar(stream, clock=lambda: next(now))
        bar("fetching", 0, 10_000)
        bar("fetching", 5_000, 10_000)
        bar("unpacking", 1, None)
        bar("parts", 1, 2)
        bar.close()
        bar.close()
    assert log.getvalue() == "fetching\nunpacking\nparts\n"
    assert "━━━━━━━━━━━━╌" in screen.getvalue()
    assert "5.00 kB of 10.0 kB" in screen.getvalue()
    assert screen.getvalue().endswith("1 of 2\n")

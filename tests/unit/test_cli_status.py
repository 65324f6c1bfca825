"""The line that tells what is waited for: drawn late, gone at the end, and never in the way of an answer."""

from __future__ import annotations

import io
import itertools
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from unspool.cli import main, status
from unspool.cli.loading import LoadProgress
from unspool.cli.status import Status, bar, work_of
from unspool.engine.engine import Engine


class Stream(io.StringIO):
    """Remembers what is written and lets a test wait for it."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal, self.seen = is_terminal, threading.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        if " s" in text:
            self.seen.set()
        return count


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DELAY", "INTERVAL"):
        monkeypatch.setattr(status, name, 0.001)


def test_a_terminal_has_one_line_which_goes_away(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Stream(is_terminal=True)
    with Status(lambda: "x" * 60, stream=stream) as shown:
        while "xxx" not in stream.getvalue():
            threading.Event().wait(0.001)
        shown.end()
        written = stream.getvalue()
        threading.Event().wait(0.02)
        assert stream.getvalue() == written, "nothing is drawn once it has ended"
    assert written.endswith("\r\033[K")
    assert written.startswith(f"\r\033[K{'x' * 39}")
    assert "\n" not in written


def test_elsewhere_there_are_lines_if_they_are_wanted(at_once: None) -> None:
    stream = Stream(is_terminal=False)
    with Status(lambda: "reading", True, stream, line_interval=0.001):
        assert stream.seen.wait(600)
    assert re.match(r"unspool: reading · \d+ s\n", stream.getvalue())


@pytest.mark.parametrize(("wanted", "is_terminal"), [(None, False), (False, True), (False, False)])
def test_else_there_is_nothing(at_once: None, wanted: bool | None, is_terminal: bool) -> None:
    stream = Stream(is_terminal=is_terminal)
    with Status(lambda: "reading", wanted, stream):
        assert not stream.seen.wait(0.02)
    assert stream.getvalue() == ""


def test_what_changes_under_its_eyes_is_looked_at_again(at_once: None) -> None:
    calls = []

    def describe() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("list changed size during iteration")
        return "reading"

    stream = Stream(is_terminal=True)
    with Status(describe, stream=stream):
        assert stream.seen.wait(600)


def request(prompt: int, computed: int, output: int = 0) -> Any:
    return SimpleNamespace(num_prompt=prompt, num_computed=computed, num_output=output)


def test_what_an_engine_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def reported(running: list[Any], waiting: list[Any]) -> str:
        return work_of(SimpleNamespace(scheduler=SimpleNamespace(running=running, waiting=waiting)))  # type: ignore[arg-type]

    monkeypatch.setenv("COLUMNS", "100")
    assert reported([], []) == "preparing the prompt"
    assert reported([request(3000, 1000), request(10, 12, 3)], [request(990, 0)]) == (
        "reading the prompt ━━━━╌╌╌╌╌╌╌╌╌╌╌╌ 1,010 of 4,000 tokens (25%)"
    )
    assert reported([request(10, 12, 1)], []) == "answering, 1 token"
    assert reported([request(10, 12, 40), request(10, 12, 2)], []) == "answering, 42 tokens"
    monkeypatch.setenv("COLUMNS", "40")
    assert reported([request(3000, 1000)], []) == "reading the prompt 1,000 of 3,000 tokens (33%)"
    progress = LoadProgress("m.gguf", 4_000_000_000)
    assert progress.describe() == "loading m.gguf"
    progress.take(0.5)
    assert progress.describe() == "loading m.gguf 2.00 GB of 4.00 GB (50%)"


def test_a_bar_is_full_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert bar("x", 1.0, "9 of 9") == f"x {'━' * 16} 9 of 9 (100%)"
    assert bar("x", 0.0, "0 of 9") == f"x {'╌' * 16} 0 of 9 (0%)"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--raw", "a" * 3000, "-n", "1"], "reading the prompt"),
        (["explain", "--raw", "a" * 3000, "-n", "1"], "reading the prompt"),
        (["run", "--raw", "ab", "-n", "300", "--ignore-eos", "--json"], "answering"),
    ],
)
def test_commands_tell(
    arguments: list[str], expected: str, at_once: None, chat_model: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(status, "LINE_INTERVAL", 0.0)
    is_shown, num_steps, draw, step = threading.Event(), itertools.count(1), Status._draw, Engine.step

    def drawn(self: Status, text: str) -> None:
        draw(self, text)
        if expected in text:
            is_shown.set()

    def held(engine: Engine) -> object:
        """The second step waits until the line shows what the engine is at."""
        assert next(num_steps) == 1 or is_shown.wait(600)
        return step(engine)

    monkeypatch.setattr(Status, "_draw", drawn)
    monkeypatch.setattr(Engine, "step", held)
    engine = ["-m", chat_model, "--device", "cpu", "--threads", "1", "--step-tokens", "16", "--seed", "1"]
    monkeypatch.setattr(Status.__init__, "__defaults__", (None, None, 0.0005))
    assert main([*arguments, *engine, "--progress"]) == 0
    assert expected in capsys.readouterr().err
    assert main([*arguments, *engine, "-q"]) == 0
    assert capsys.readouterr().err == ""

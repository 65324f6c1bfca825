"""A tiny chat model as a file, for the commands that open one."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from unspool.engine.streams import Stream
from unspool.models.random import SHAPES, byte_vocabulary, random_checkpoint
from unspool.models.registry import metadata_of
from unspool.weights.gguf_writer import write_gguf

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _write(path: Path, *, context_length: int, template: str | None) -> str:
    config = replace(SHAPES["tiny"], context_length=context_length)
    metadata = metadata_of(config) | byte_vocabulary(config.vocab_size)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    write_gguf(path, metadata, random_checkpoint(config).weights)
    return str(path)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte is a token; the context is so long that an answer without a limit outlasts any test."""
    return _write(tmp_path_factory.mktemp("models") / "tiny-chat.gguf", context_length=60_000, template=TEMPLATE)


@pytest.fixture(scope="session")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with room for 96 tokens."""
    return _write(tmp_path_factory.mktemp("models") / "tiny-short.gguf", context_length=96, template=TEMPLATE)


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without a chat template."""
    return _write(tmp_path_factory.mktemp("models") / "tiny-base.gguf", context_length=512, template=None)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of one's own, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "unspool"


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """interrupt_at(step, times=1): Ctrl-C before the engine computes its n-th step, which waits until it was heard."""
    from unspool.cli.answer import Interrupt
    from unspool.engine.engine import Engine

    watching, heard = threading.Event(), threading.Event()
    watch, note, step = Interrupt.watch, Interrupt._note, Engine.step

    def watched(self: Interrupt, stream: Stream) -> None:
        watch(self, stream)
        watching.set()

    def noted(self: Interrupt, number: int, frame: FrameType | None) -> None:
        try:
            note(self, number, frame)
        finally:
            heard.set()  # now that the abort is on its way

    def interrupt(number: int, times: int = 1) -> None:
        count = itertools.count(1)

        def interrupted(engine: Engine) -> object:
            if next(count) == number:
                assert watching.wait(600)
                for _ in range(times):
                    heard.clear()
                    while not heard.is_set():  # again if the main thread was just about to sleep
                        os.kill(os.getpid(), signal.SIGINT)
                        heard.wait(1)
            return step(engine)

        monkeypatch.setattr(Interrupt, "watch", watched)
        monkeypatch.setattr(Interrupt, "_note", noted)
        monkeypatch.setattr(Engine, "step", interrupted)

    return interrupt

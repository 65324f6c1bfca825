"""A tiny chat model as a file, for the commands that open one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

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

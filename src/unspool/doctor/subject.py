"""The model under examination: its checkpoint, tokenizer and template, and what its files say beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unspool.config import EngineConfig
from unspool.errors import UnspoolError
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.overridden import overridden
from unspool.text.tokenizer import Tokenizer
from unspool.weights.fields import read_json

GGUF_SAMPLING = "general.sampling."


@dataclass(frozen=True, eq=False)
class Subject:
    """Everything the checks look at. What cannot be opened at all is the caller's ModelError, not a finding."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    generation: Mapping[str, Any]  # the model's own generation settings, as its files spell them
    pad_id: int | None

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset(self.checkpoint.eos_ids) | self.tokenizer.eos_ids

    def name_of(self, token: int) -> str:
        return f"{self.tokenizer.token_text(token)!r} ({token})"

    @cached_property
    def rendered(self) -> Rendered | UnspoolError | None:
        """A short conversation through the model's own template; None: it has none."""
        return render(self)


@dataclass(frozen=True)
class Rendered:
    """Token ids of a conversation whose last message is the assistant's, and the places of its text."""

    ids: tuple[int, ...]
    text: str


ANSWER = "Quite so indeed"
TALK = ({"role": "user", "content": "Is it so?"}, {"role": "assistant", "content": ANSWER})


def render(subject: Subject) -> Rendered | UnspoolError | None:
    from unspool.chat.template import template_of

    tokenizer = subject.tokenizer
    try:
        template = template_of(subject.checkpoint, tokenizer)
        if template is None:
            return None
        text = template.render(TALK, add_generation_prompt=False)
        return Rendered(tuple(tokenizer.encode(text, add_special=False, parse_special=True)), text)
    except UnspoolError as error:
        return error


def open_subject(
    model: Path | Checkpoint, options: Mapping[str, Any] | None = None, tokenizer: Tokenizer | None = None
) -> Subject:
    """`options` are EngineConfig's; those that override what the model's files say hold here too. `tokenizer`: the
    checkpoint's own, where it was made already."""
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    checkpoint = overridden(checkpoint, EngineConfig(**(options or {})))
    tokenizer = tokenizer or checkpoint.tokenizer()
    read = _directory_facts if checkpoint.path.is_dir() else _file_facts
    generation, pad_id = read(checkpoint.path, tokenizer)
    return Subject(checkpoint, tokenizer, generation, pad_id)


def _file_facts(path: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], int | None]:
    """A GGUF file's metadata, and the generation settings that lie beside it."""
    from unspool.weights.gguf import open_gguf

    if not path.is_file():  # a random model has no file
        return {}, None
    metadata = open_gguf(path).metadata
    own = {key.removeprefix(GGUF_SAMPLING): value for key, value in metadata.items() if key.startswith(GGUF_SAMPLING)}
    beside = path.with_suffix(".generation_config.json")
    pad = metadata.get("tokenizer.ggml.padding_token_id")
    return own | (read_json(beside) if beside.is_file() else {}), pad if isinstance(pad, int) else None


def _directory_facts(path: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], int | None]:
    found = {name: read_json(path / name) for name in ("generation_config.json", "config.json", "tokenizer_config.json")
             if (path / name).is_file()}  # fmt: skip
    generation = found.get("generation_config.json", {})
    for source in (generation, found.get("config.json", {})):
        if isinstance(source.get("pad_token_id"), int):
            return generation, source["pad_token_id"]
    pad = found.get("tokenizer_config.json", {}).get("pad_token")
    text = pad.get("content") if isinstance(pad, dict) else pad
    ids = tokenizer.encode(text, add_special=False, parse_special=True) if isinstance(text, str) else []
    return generation, ids[0] if len(ids) == 1 else None

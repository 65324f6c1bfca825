"""A tokenizer from a Hugging Face directory: tokenizer.json does the work, tokenizer_config.json names the marks.

The library that tokenizer.json is written for reads it in a process with limits (`text/tokenizer_worker.py`): what it
says of the vocabulary comes back once, token ids for each text.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.errors import ModelError, RequestError
from unspool.isolation import LimitedProcess, StoppedError
from unspool.text.gguf_vocabulary import end_ids
from unspool.text.tokenizer import Tokenizer
from unspool.text.vocabulary import Spelling, Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
MIB = 1 << 20
MAX_FILE = 128 * MIB  # the largest known, of 262,144 tokens, has 33
MAX_SETTINGS = 16 * MIB
# Of the process: encoding takes some 250 bytes for each byte of a text, loading 16 for each of the file.
MEMORY, MEMORY_PER_BYTE = 2048 * MIB, 32
LONGEST_ANSWER = 256 * MIB
# The library loads ten megabytes in a second, and encodes one megabyte of text.
LOAD_SECONDS = 60.0
ENCODE_SECONDS, ENCODE_SECONDS_PER_MIB = 10.0, 10.0
LONG_TEXT = MIB  # a limit that a shorter text meets is the file's fault, else it is the text's


@dataclass(frozen=True)
class _Told:
    """What the library says of a tokenizer.json."""

    tokens: list[str]
    added: list[int]
    special: list[int]
    spelling: Spelling
    strips_leading_space: bool
    in_front: list[int]  # what the file puts in front of every text

    def __post_init__(self) -> None:
        """The process that said so worked on a stranger's file: nothing is taken on trust."""
        size, ids = len(self.tokens), [*self.added, *self.special, *self.in_front]
        if not (
            all(type(token) is str for token in self.tokens)
            and all(type(index) is int and 0 <= index < size for index in ids)
            and self.spelling in ("byte-level", "sentencepiece")
            and type(self.strips_leading_space) is bool
        ):
            raise ValueError


class _LibraryEncoder:
    """The `tokenizers` library with one file, wherever it runs."""

    def __init__(self, file: Path) -> None:
        self._file = file
        size = self._size()
        self._process = LimitedProcess(
            "unspool.text.tokenizer_worker", ("tokenizers",), MEMORY + MEMORY_PER_BYTE * size, LONGEST_ANSWER
        )
        self.told = self._load()
        self._vocab_size = len(self.told.tokens)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        content = text.encode("utf-8")
        seconds = ENCODE_SECONDS + ENCODE_SECONDS_PER_MIB * len(content) / MIB
        ids = array("I")
        ids.frombytes(self._ask(b"E1" if parse_special else b"E0", content, seconds))
        if ids and max(ids) >= self._vocab_size:
            raise ModelError(f"{self._file}: it writes the token {max(ids):,}, which it does not have")
        return ids.tolist()

    def fingerprint(self) -> str:
        return self._ask(b"F", b"", LOAD_SECONDS).decode("ascii", "replace")

    def _load(self) -> _Told:
        reply = self._call(b"L" + self._file.read_bytes(), LOAD_SECONDS)
        if reply[:1] != b"+":
            raise ModelError(f"{self._file}: not a tokenizer this program can read: {_reason(reply)}")
        try:
            return _Told(**json.loads(reply[1:]))
        except (ValueError, TypeError) as error:
            raise ModelError(f"{self._file}: what it says of its vocabulary cannot be true") from error

    def _ask(self, operation: bytes, content: bytes, seconds: float) -> bytes:
        reply = self._call(operation + content, seconds)
        if reply[:1] == b"?":  # the process was stopped meanwhile, and is another one now
            if self._load() != self.told:
                raise ModelError(f"{self._file}: it was changed since it was opened")
            reply = self._call(operation + content, seconds)
        if reply[:1] != b"+":
            raise ModelError(f"{self._file}: the text cannot be encoded: {_reason(reply)}")
        return reply[1:]

    def _call(self, request: bytes, seconds: float) -> bytes:
        try:
            return self._process.call(request, seconds)
        except StoppedError as error:
            if request[:1] == b"E" and len(request) > LONG_TEXT:
                raise RequestError(
                    f"a text of {len(request) - 2:,} bytes cannot be encoded: {error}", "prompt"
                ) from error
            doing = "loading it" if request[:1] == b"L" else "encoding a text"
            raise ModelError(f"{self._file}: {doing} was stopped: {error}") from error

    def _size(self) -> int:
        try:
            size = self._file.stat().st_size
        except OSError:
            raise ModelError(f"{self._file}: missing; the model directory brings no tokenizer") from None
        if not self._file.is_file() or size > MAX_FILE:
            raise ModelError(f"{self._file}: not a file of at most {MAX_FILE:,} bytes")
        return size


def _reason(reply: bytes) -> str:
    return reply[1:].decode("utf-8", "replace")


def build(path: Path, config: Mapping[str, Any], extra_eos: Collection[int]) -> Tokenizer:
    """The tokenizer of the directory at `path`; a ModelError names the file at fault."""
    settings = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    encoder = _LibraryEncoder(path / "tokenizer.json")
    told = encoder.told
    ids = {text: index for index, text in enumerate(told.tokens) if text}
    byte_of, literal = {}, told.added
    if told.spelling == "sentencepiece":
        byte_of = {index: int(found[1], 16) for text, index in ids.items() if (found := _BYTE_TOKEN.fullmatch(text))}
        literal = []  # Gemma's runs of "▁" are added tokens, and stand for spaces as any "▁" does
    bos = _named_id("bos_token", settings, config, ids, path)
    eos = _named_id("eos_token", settings, config, ids, path)
    ends = {eos, *extra_eos, *_config_eos(config)} - {None} | end_ids(ids, frozenset(told.special))
    adds_bos = settings.get("add_bos_token")
    if not isinstance(adds_bos, bool):  # what the file does to an empty text tells
        adds_bos = told.in_front == [bos]
    return Tokenizer(
        Vocabulary(told.tokens, told.spelling, special=told.special, literal=literal, bytes_of=byte_of),
        encoder,
        bos_id=bos,
        eos_ids={index for index in ends if index is not None},
        adds_bos=bos is not None and adds_bos,
        strips_leading_space=told.strips_leading_space,
        fingerprint=encoder.fingerprint,
        named_tokens=_named_tokens(settings),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    if file.stat().st_size > MAX_SETTINGS:
        raise ModelError(f"{file}: larger than {MAX_SETTINGS:,} bytes")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: expected an object, got {type(value).__name__}")
    return value


def _named_id(
    name: str, settings: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int], path: Path
) -> int | None:
    """The id of a mark that tokenizer_config.json names by its text, or config.json by its id."""
    token = _content(settings.get(name))
    if token is not None:
        if token not in ids:
            raise ModelError(f"{path}: {name} is {token!r}, which the vocabulary lacks")
        return ids[token]
    index = config.get(f"{name}_id")
    return index if isinstance(index, int) else None


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """The tokens that the configuration names, by those names: chat templates know them by these."""
    extra = settings.get("extra_special_tokens")
    entries = {name: value for name, value in settings.items() if name.endswith("_token")}
    named: dict[str, str | list[str]] = {}
    for name, value in (entries | (extra if isinstance(extra, dict) else {})).items():
        if (text := _content(value)) is not None:
            named[name] = text
    additional = settings.get("additional_special_tokens")
    if isinstance(additional, list):
        named["additional_special_tokens"] = [text for each in additional if (text := _content(each)) is not None]
    return named


def _content(token: Any) -> str | None:
    """A token's text: files write it as it is, or as an object that says how it is matched, too."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _config_eos(config: Mapping[str, Any]) -> set[int]:
    """config.json may name one end token or several."""
    value = config.get("eos_token_id")
    return {index for index in (value if isinstance(value, list) else [value]) if isinstance(index, int)}

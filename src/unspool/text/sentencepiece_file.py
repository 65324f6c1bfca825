"""SentencePiece's model file, `tokenizer.model`: pieces with scores and types, and how texts are normalized.

A protocol buffer message. The file is untrusted, so sizes are limited and every error is a ModelError that names the
file and the piece.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import field
from pathlib import Path

from unspool.errors import ModelError
from unspool.records import record
from unspool.text.protobuf import ProtobufError, Value, fields
from unspool.text.token_types import BYTE, NORMAL, UNKNOWN

MAX_FILE = 32 << 20  # the largest known, of 262,144 pieces, has 5
MAX_PIECES = 1 << 20
MAX_PIECE = 4096  # bytes
UNIGRAM, BPE = 1, 2
_OTHER_MODELS = {3: "WORD", 4: "CHAR"}


@record
class SentencePieceFile:
    """Pieces in the order of their ids, and the settings that encoding depends on."""

    model: int = UNIGRAM
    pieces: list[str] = field(default_factory=list)
    scores: array[float] = field(default_factory=lambda: array("f"))
    types: list[int] = field(default_factory=list)
    bos_id: int = 1
    eos_id: int = 2
    adds_space: bool = True
    removes_extra_spaces: bool = True
    space_is_suffix: bool = False
    character_map: bytes = b""

    def ids_of(self, *types: int) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in types]


def read_sentencepiece(path: Path) -> SentencePieceFile:
    if path.stat().st_size > MAX_FILE:
        raise ModelError(f"{path}: larger than {MAX_FILE:,} bytes")
    content = path.read_bytes()
    if content[:1] != b"\n":  # the key of the first piece
        raise ModelError(f"{path}: not a SentencePiece model: its first byte is {content[:1]!r}, no piece begins so")
    try:
        found = _read(content)
        _check(found)
    except ProtobufError as error:
        raise ModelError(f"{path}: not a SentencePiece model: {error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    return found


def _read(content: bytes) -> SentencePieceFile:
    found = SentencePieceFile()
    readers = {1: _read_piece, 2: _read_trainer, 3: _read_normalizer}
    for number, value in fields(content):
        if number in readers:
            if not isinstance(value, bytes):
                raise ProtobufError(f"field {number} is not a message")
            readers[number](found, value)
    return found


def _read_piece(found: SentencePieceFile, message: bytes) -> None:
    index = len(found.pieces)
    if index >= MAX_PIECES:
        raise ValueError(f"more than {MAX_PIECES:,} pieces")
    text, score, kind = b"", 0.0, NORMAL
    for number, value in fields(message):
        if number == 1 and isinstance(value, bytes):
            text = value
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
    if not 0 < len(text) <= MAX_PIECE:
        raise ValueError(f"pieces[{index}] has {len(text):,} bytes; 1 to {MAX_PIECE:,} are possible")
    if not NORMAL <= kind <= BYTE:
        raise ValueError(f"pieces[{index}].type: unknown type {kind}")
    if math.isnan(score):
        raise ValueError(f"pieces[{index}].score is not a number")
    try:
        found.pieces.append(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"pieces[{index}] is not UTF-8: {error}") from error
    found.scores.append(score)
    found.types.append(kind)


def _signed(value: Value) -> int:
    """Negative numbers are stored as their 64 bits."""
    number = int(value) if isinstance(value, int) else -1
    return number - (1 << 64) if number >> 63 > 0 else number


def _read_trainer(found: SentencePieceFile, message: bytes) -> None:
    for number, value in fields(message):
        if number == 3:
            found.model = _signed(value)
        elif number == 24:
            found.space_is_suffix = bool(value)
        elif number == 41:
            found.bos_id = _signed(value)
        elif number == 42:
            found.eos_id = _signed(value)
    if found.model not in (UNIGRAM, BPE):
        name = _OTHER_MODELS.get(found.model, str(found.model))
        raise ValueError(f"trainer_spec.model_type {name} is not supported (UNIGRAM and BPE are)")


def _read_normalizer(found: SentencePieceFile, message: bytes) -> None:
    for number, value in fields(message):
        if number == 2 and isinstance(value, bytes):
            found.character_map = value
        elif number == 3:
            found.adds_space = bool(value)
        elif number == 4:
            found.removes_extra_spaces = bool(value)
        elif number == 5 and not value:
            raise ValueError("normalizer_spec.escape_whitespaces: false is not supported")


def _check(found: SentencePieceFile) -> None:
    if not found.pieces:
        raise ValueError("the vocabulary is empty")
    places: dict[str, int] = {}
    for index, text in enumerate(found.pieces):
        if places.setdefault(text, index) != index:
            raise ValueError(f"pieces: {text!r:.60} stands at {places[text]:,} and at {index:,}")
    if len(found.ids_of(UNKNOWN)) != 1:
        raise ValueError(f"pieces: {len(found.ids_of(UNKNOWN))} of the type UNKNOWN; one was expected")

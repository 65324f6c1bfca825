"""tokenizer.json in a process with limits, where the `tokenizers` library reads it (`tokenizer_worker.py`).

The process returns the vocabulary once, and token ids for each text.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path

from unspool.errors import ModelError, RequestError
from unspool.isolation import LimitedProcess, StoppedError
from unspool.records import record
from unspool.text.vocabulary import Spelling

MIB = 1 << 20
MAX_FILE = 128 * MIB  # the largest known, of 262,144 tokens, has 33
# Of the process: encoding takes some 250 bytes for each byte of a text, loading 16 for each of the file.
MEMORY, MEMORY_PER_BYTE = 2048 * MIB, 32
LONGEST_ANSWER = 256 * MIB
# The library loads ten megabytes in a second, and encodes one megabyte of text.
LOAD_SECONDS = 60.0
ENCODE_SECONDS, ENCODE_SECONDS_PER_MIB = 10.0, 10.0
LONG_TEXT = MIB  # if a shorter text exceeds a limit, the error blames the file, else the text


@record(frozen=True)
class TokenizerReport:
    """The library's report on a tokenizer.json."""

    tokens: list[str]
    added: list[int]
    special: list[int]
    spelling: Spelling
    strips_leading_space: bool
    in_front: list[int]  # the ids that the file puts in front of every text

    def __post_init__(self) -> None:
        """Check every value: the process worked on an untrusted file."""
        size, ids = len(self.tokens), [*self.added, *self.special, *self.in_front]
        if not (
            all(type(token) is str for token in self.tokens)
            and all(type(index) is int and 0 <= index < size for index in ids)
            and self.spelling in ("byte-level", "sentencepiece")
            and type(self.strips_leading_space) is bool
        ):
            raise ValueError


class LibraryEncoder:
    """The `tokenizers` library with one file, wherever it runs."""

    def __init__(self, file: Path) -> None:
        self._file = file
        size = self._size()
        self._process = LimitedProcess(
            "unspool.text.tokenizer_worker", ("tokenizers",), MEMORY + MEMORY_PER_BYTE * size, LONGEST_ANSWER
        )
        self.report = self._load()
        self._vocab_size = len(self.report.tokens)

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

    def _load(self) -> TokenizerReport:
        reply = self._call(b"L" + self._file.read_bytes(), LOAD_SECONDS)
        if reply[:1] != b"+":
            raise ModelError(f"{self._file}: not a tokenizer this program can read: {_reason(reply)}")
        try:
            return TokenizerReport(**json.loads(reply[1:]))
        except (ValueError, TypeError) as error:
            raise ModelError(f"{self._file}: what it says of its vocabulary cannot be true") from error

    def _ask(self, operation: bytes, content: bytes, seconds: float) -> bytes:
        reply = self._call(operation + content, seconds)
        if reply[:1] == b"?":  # the process was stopped in between; this is a new one
            if self._load() != self.report:
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

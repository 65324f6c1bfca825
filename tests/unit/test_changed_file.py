"""A model's file that another program changes while it is open: its vocabulary stays, and a cut is told by name."""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.errors import ModelError
from unspool.events import Failed
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.random import SHAPES, write_random_gguf
from unspool.params import SamplingParams
from unspool.text.texts import read_texts

pytest.importorskip("unspool._native")
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "own.gguf"
    write_random_gguf(path, SHAPES["tiny-wide"], format="q4_1")
    return path


def test_strings_are_not_read_from_the_file_again() -> None:
    texts = ["first", "second", "third", "fourth", "fifth"]
    raw = b"".join(struct.pack("<Q", len(text)) + text.encode() for text in texts)
    buffer = bytearray(raw)
    read = read_texts(buffer, 0, len(texts))
    assert read is not None
    assert read[1] == len(raw)
    for place in range(0, len(buffer), 8):
        buffer[place : place + 8] = struct.pack("<Q", 1)[: len(buffer) - place]
    assert list(read[0]) == texts
    assert read[0].native.find("third") == 2


CHANGED_HEADER = """
import sys
from unspool.models.checkpoint import Checkpoint, open_checkpoint
path = sys.argv[1]
tokenizer = open_checkpoint(path).tokenizer()
before = tokenizer.encode("Some text with several words in it")
with open(path, "r+b") as file:
    file.seek(64)
    file.write(b"\\xff" * 400_000)
assert tokenizer.encode("Some text with several words in it") == before
print([tokenizer.decode([token]) for token in range(2000)])
"""


def test_a_header_that_is_overwritten_changes_no_token(smollm2_path: Path, tmp_path: Path) -> None:
    """In a process of its own, which such a file could once end."""
    path = shutil.copy(smollm2_path, tmp_path / "own.gguf")
    tokenizer = open_checkpoint(path).tokenizer()
    expected = [tokenizer.decode([token]) for token in range(2000)]
    done = subprocess.run(
        [sys.executable, "-c", CHANGED_HEADER, str(path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(expected)


def make(checkpoint: Checkpoint) -> Engine:
    return Engine(checkpoint, EngineConfig(device="cpu", kv_tokens=64, threads=1))


def test_a_file_cut_before_its_weights_are_packed_is_named(path: Path) -> None:
    engine, whole = make(open_checkpoint(path)), path.stat().st_size
    os.truncate(path, whole // 2)
    message = f"{path} was cut from {whole:,} to {whole // 2:,} bytes while it was in use"
    for _ in range(2):  # and again: what was not packed is never multiplied by
        engine.add([1, 2, 3], SamplingParams(max_tokens=2))
        (event,) = engine.step()
        assert isinstance(event, Failed)
        assert message in str(event.error)


def test_a_file_cut_before_its_vectors_are_read_is_named(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    os.truncate(path, PAGE)
    with pytest.raises(ModelError, match=re.escape(f"{path} was cut from")):
        make(checkpoint)


CUT_FILE = """
import os, sys
from unspool.weights.mapping import map_file
mapping = map_file(sys.argv[1])
os.truncate(sys.argv[1], 4096)
print(mapping[0], flush=True)
mapping[len(mapping) - 1]
"""


@pytest.mark.parametrize("options", [[], ["-X", "faulthandler"]])
def test_a_read_of_what_is_gone_names_the_file(options: list[str], path: Path) -> None:
    """The system ends the process all the same; a handler of somebody else's comes after ours."""
    done = subprocess.run(
        [sys.executable, *options, "-c", CUT_FILE, str(path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == f"{ord('G')}\n"
    assert done.stderr.startswith(f"unspool: {path} was cut shorter, or cannot be read any more")
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(options)
    assert options or done.stderr.count("\n") == 1


ELSEWHERE = """
import ctypes, os, signal, sys
from unspool.weights.mapping import map_file
mapping = map_file(sys.argv[1])
if sys.argv[2] == "fault":
    ctypes.string_at(8)
os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.parametrize("how", ["fault", "signal"])
def test_a_fault_elsewhere_ends_the_process_as_ever(how: str, path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(path), how], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (-signal.SIGSEGV, "")

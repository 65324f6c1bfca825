"""Packing goes on beside a start: whoever comes first to a step, its bits are the same; the file's pages go back."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.events import Text
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.random import SHAPES, write_random_gguf
from unspool.params import SamplingParams
from unspool.weights.mapping import mapping_of

pytest.importorskip("unspool._native")
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than one piece (a megabyte of the file) in its largest tensors."""
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    write_random_gguf(path, replace(SHAPES["tiny-wide"], intermediate_size=8192, vocab_size=16_384), format="q4_1")
    return path


def answer(engine: Engine) -> list[Any]:
    engine.add(PROMPT, SamplingParams(max_tokens=4, temperature=0, logprobs=3))
    events = []
    while engine.has_work:
        events += engine.step()
    return [event.tokens for event in events if isinstance(event, Text)]


def make(checkpoint: Checkpoint, **options: Any) -> Engine:
    return Engine(checkpoint, EngineConfig(device="cpu", kv_tokens=256, **options))


def test_one_thread_or_two_finished_early_or_late(path: Path) -> None:
    late = make(open_checkpoint(path), threads=2)
    early = make(open_checkpoint(path), threads=2)
    early.ops.finish_loading()
    alone = make(open_checkpoint(path), threads=1)
    assert answer(late) == answer(early) == answer(alone)


def test_an_engine_may_go_before_its_weights_are_packed(path: Path) -> None:
    for _ in range(20):
        make(open_checkpoint(path), threads=2).close()


def test_loading_tells_its_progress_and_leaves_the_cores_to_other_models(path: Path) -> None:
    """A step of a model that is ready is computed while another's weights are packed, and its bits are the same."""
    ready = make(open_checkpoint(path), threads=1)
    expected, shares = answer(ready), []

    def on_progress(share: float) -> None:
        shares.append(share)
        if len(shares) == 1:
            worker = threading.Thread(target=lambda: found.append(answer(ready)))
            worker.start()
            worker.join(600)

    found: list[Any] = []
    config = EngineConfig(device="cpu", kv_tokens=256, threads=1)
    loaded = Engine(open_checkpoint(path), config, on_progress=on_progress)
    assert found == [expected]
    assert shares == sorted(shares)
    assert shares[0] < 1.0, "more than one piece: the first was told before the last"
    assert shares[-1] == 1.0
    assert answer(loaded) == expected


def test_a_forked_child_finishes_what_its_parent_began(path: Path) -> None:
    engine = make(open_checkpoint(path), threads=2)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, repr(answer(engine)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        theirs = file.read().decode()
    os.waitpid(child, 0)
    assert theirs
    assert theirs == repr(answer(engine))


def test_the_files_pages_are_given_back(path: Path, tmp_path: Path) -> None:
    path = shutil.copy(path, tmp_path / "own.gguf")  # others may have mapped the shared one
    checkpoint = open_checkpoint(path)
    data = checkpoint.weights["blk.0.ffn_down.weight"].data
    assert mapping_of(data) is not None
    assert int(data.astype(np.int64).sum()) > 0  # every page is looked at
    before = resident(path)
    make(checkpoint, threads=2).ops.finish_loading()
    after = resident(path)
    assert before > 0
    assert after <= before / 4
    assert data.any(), "and can be read again"


def resident(path: Path) -> int:
    """KiB of a file that this process holds."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_a_vocabularys_pages_are_given_back_too(path: Path, tmp_path: Path) -> None:
    path = shutil.copy(path, tmp_path / "own.gguf")
    checkpoint = open_checkpoint(path)
    assert resident(path) > 128, "its header has been read"
    tokenizer = checkpoint.tokenizer()
    assert resident(path) <= 64, "what came along behind the header"
    assert tokenizer.decode(tokenizer.encode("The same text")) == "The same text"


def test_shares_taken_whole_or_by_halves_give_the_same_bits(path: Path) -> None:
    """Both ways are tried every 256 steps; one thread has nothing to share."""
    params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True, logprobs=0)
    reported = []
    for threads in (1, 2):
        engine = Engine(open_checkpoint(path), EngineConfig(device="cpu", kv_tokens=512, threads=threads))
        engine.add(PROMPT, params)
        tokens = []
        while engine.has_work:
            tokens += [token for event in engine.step() for token in getattr(event, "tokens", ())]
        reported.append([(token.id, token.logprob) for token in tokens])
    assert len(reported[0]) == 300
    assert reported[0] == reported[1]

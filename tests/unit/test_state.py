"""Saved prompts: the same bits in the next engine, and every file that is something else refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from unspool.config import EngineConfig
from unspool.engine import state
from unspool.engine.engine import Engine
from unspool.errors import ModelError, RequestError
from unspool.events import Event, Finished, Text
from unspool.params import SamplingParams

PROMPT = list(range(50, 81))  # seven full blocks of four, and three tokens
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture
def make_engine(tiny: Callable[..., Any]) -> Callable[..., Engine]:
    def make(shape: str = "tiny", kv_tokens: int = 256) -> Engine:
        return Engine(tiny(shape), EngineConfig(device="reference", kv_tokens=kv_tokens, block_size=4))

    return make


def answer(engine: Engine, params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    """(token ids, how many tokens of the prompt came from the cache)"""
    engine.add(PROMPT, params)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    engine.scheduler.blocks.check()
    ids = [token.id for event in events if isinstance(event, Text) for token in event.tokens]
    return ids, next(event.usage.cached_tokens for event in events if isinstance(event, Finished))


@pytest.fixture
def saved(make_engine: Callable[..., Engine], tmp_path: Path) -> Path:
    engine = make_engine()
    answer(engine, SamplingParams(max_tokens=0))
    assert state.save(engine, PROMPT, tmp_path / "saved") == 28
    return tmp_path / "saved"


def test_saved_state_is_a_hit_in_the_next_engine(make_engine: Callable[..., Engine], saved: Path) -> None:
    engine = make_engine()
    assert state.load(engine, saved) == PROMPT[:28]
    ids, cached = answer(engine)
    assert cached == 28
    assert ids == answer(make_engine())[0]
    assert state.load(engine, saved) == PROMPT[:28], "loading twice is harmless"
    engine.scheduler.blocks.check()


def test_another_model_or_cache_is_named(make_engine: Callable[..., Engine], saved: Path) -> None:
    with pytest.raises(ModelError, match="was saved with model"):
        state.load(make_engine("tiny-qwen2"), saved)
    with pytest.raises(RequestError, match="holds 7 blocks; 4 are free") as caught:
        state.load(make_engine(kv_tokens=16), saved)
    assert caught.value.param == "kv_tokens"


def test_what_is_no_file_is_refused_and_not_waited_for(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("absent", "pipe", "."):
        with pytest.raises(ModelError, match=r"cannot read the state .*: it is no file, or not there"):
            state.load(make_engine(), tmp_path / name)


def with_header(header: bytes, length: int | None = None) -> bytes:
    return state.MAGIC + (len(header) if length is None else length).to_bytes(8, "little") + header


def test_hostile_headers_are_named(make_engine: Callable[..., Engine], saved: Path, tmp_path: Path) -> None:
    data, engine = saved.read_bytes(), make_engine()
    start = len(state.MAGIC) + 8
    length = int.from_bytes(data[start - 8 : start], "little")
    header, blocks = json.loads(data[start : start + length]), data[start + length :]

    def changed(**values: Any) -> bytes:
        return with_header(json.dumps(header | values).encode()) + blocks

    deep: Any = []
    for _ in range(900):
        deep = [deep]
    cases = {
        with_header(b"[" * 60_000): "its header is not JSON",
        with_header(b"1" * 60_000): "its header is not JSON",
        with_header(b"\xff"): "its header is not JSON",
        with_header(b"[]"): "its header is no object",
        with_header(b"{}"): "was saved with model None",
        with_header(b"{}", (1 << 64) - 1): "its header would have 18,446,744,073,709,551,615 bytes",
        with_header(b"[" + b"[]," * 50_000 + b"[]]"): "its header would have 150,004 bytes",
        changed(model="x" * 50_000): "was saved with model 'xxx.{0,80}; here",
        changed(layout=deep): "was saved with layout a list; here",
        changed(block_size=None): "was saved with block_size None",
        changed(block_bytes=-1): "was saved with block_bytes -1",
        changed(tokens=[-1] * 28): "tokens are not whole blocks of this vocabulary",
        changed(tokens=[1 << 70] * 28): "tokens are not whole blocks of this vocabulary",
        changed(tokens=[True] * 28): "tokens are not whole blocks of this vocabulary",
        changed(tokens=header["tokens"][:-1]): "tokens are not whole blocks of this vocabulary",
        changed(tokens={}): "tokens are not whole blocks of this vocabulary",
        changed(tokens=header["tokens"][:-4]): "its blocks are not as long",
        changed(tokens=header["tokens"] * 9): "its blocks are not as long",
        changed(tokens=[*header["tokens"][:-1], 1]): "do not match their checksum",
        changed(checksum=5): "do not match their checksum",
    }
    for content, message in cases.items():
        (tmp_path / "hostile").write_bytes(content)
        with pytest.raises(ModelError, match=message):
            state.load(engine, tmp_path / "hostile")
    assert engine.scheduler.blocks.num_free == 64, "nothing was taken for them"


def test_damage_anywhere_is_a_model_error(make_engine: Callable[..., Engine], saved: Path, tmp_path: Path) -> None:
    """Cut at any place, and bytes changed at random, most of them in the header."""
    data, random, engine = saved.read_bytes(), Random(3), make_engine()
    start = len(state.MAGIC) + 8 + int.from_bytes(data[len(state.MAGIC) : len(state.MAGIC) + 8], "little")
    variants = [data[:cut] for cut in (*range(0, start + 2, 7), len(data) - 1)] + [data + b"x"]
    for index in range(300):
        changed = bytearray(data)
        place = random.randrange(start if index % 4 else len(data))
        changed[place] ^= 1 << random.randrange(8)
        variants.append(bytes(changed))
    for variant in variants:
        (tmp_path / "damaged").write_bytes(variant)
        with pytest.raises(ModelError):
            state.load(engine, tmp_path / "damaged")
    engine.scheduler.blocks.check()

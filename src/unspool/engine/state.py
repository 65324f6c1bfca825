"""Computed prompts on disk: a long system prompt is computed once a machine, not once a process.

    "unspool state 2\\n" · length of the header (8 bytes) · header (JSON) · block · block · …

The header names the model's fingerprint and the cache's layout, and a file is only good for the same of both: then
its blocks hold the very bits that computing them again would give. Full blocks are kept; the tokens of a last, partial
one are computed anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from unspool.cache.blocks import chain_key, root_key
from unspool.errors import EngineError, ModelError, RequestError

if TYPE_CHECKING:
    from unspool.engine.engine import Engine

MAGIC = b"unspool state 2\n"
HEADER_BYTES, TOKEN_BYTES = 65_536, 12  # a header's length: so much, and so much for each token


def save(engine: Engine, prompt: Sequence[int], path: Path, salt: str = "") -> int:
    """Write the full blocks of a computed prompt, which the prefix cache holds; how many tokens they are."""
    if not engine.config.prefix_cache:
        raise RequestError("prefix_cache is off, so no computed prompt is kept that could be saved", "prefix_cache")
    blocks, size = engine.scheduler.blocks, engine.scheduler.blocks.block_size
    key = root_key(engine.checkpoint.fingerprint, engine.runner.kv.layout, salt)
    found: list[int] = []
    for start in range(0, len(prompt) - size + 1, size):
        key = chain_key(key, prompt[start : start + size])
        block = blocks.find(key)
        if block is None:
            raise EngineError(
                f"the cache no longer holds the prompt: {len(found) * size:,} of its {len(prompt):,} tokens are left; "
                "others took its blocks, and a larger cache (kv_tokens) would have room for all"
            )
        found.append(block)
    data = [engine.runner.kv.read_block(block) for block in found]
    tokens = list(prompt[: len(found) * size])
    header = json.dumps(
        {
            "model": engine.checkpoint.fingerprint,
            "layout": engine.runner.kv.layout,
            "block_size": size,
            "block_bytes": engine.runner.kv.block_bytes,
            "tokens": tokens,
            "checksum": _checksum(tokens, data),
        }
    ).encode()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(MAGIC + len(header).to_bytes(8, "little") + header)
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EngineError(f"cannot write the state to {path}: {error.strerror or error}") from error
    return len(found) * size


def load(engine: Engine, path: Path, salt: str = "") -> list[int]:
    """Put a file's blocks into the prefix cache; the tokens they stand for.

    A checksum tells damage from what was saved. It does not tell who saved it: answers to these tokens are computed
    from the file's numbers, so a file should be as trusted as the model is.
    """
    try:
        if not path.is_file():  # opening a pipe would wait for a writer
            raise ModelError(f"cannot read the state {path}: it is no file, or not there")
        with open(path, "rb") as file:
            header = _read_header(file, engine, path)
            tokens: list[int] = header["tokens"]
            data = _read_blocks(file, len(tokens) // engine.scheduler.blocks.block_size, engine, path)
    except OSError as error:
        raise ModelError(f"cannot read the state {path}: {error.strerror or error}") from error
    if _checksum(tokens, data) != header["checksum"]:
        raise ModelError(f"{path} is damaged: its tokens and blocks do not match their checksum")
    _register(engine, tokens, data, salt)
    return tokens


def _checksum(tokens: Sequence[int], data: Sequence[bytes]) -> str:
    digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16)
    for part in data:
        digest.update(part)
    return digest.hexdigest()


def _read_blocks(file: BinaryIO, count: int, engine: Engine, path: Path) -> list[bytes]:
    size, num_free = engine.runner.kv.block_bytes, engine.scheduler.blocks.num_free
    if os.fstat(file.fileno()).st_size - file.tell() != count * size:
        raise ModelError(f"{path} is damaged: its blocks are not as long as its header says")
    if count > num_free:
        raise RequestError(
            f"{path} holds {count:,} blocks; {num_free:,} are free (kv_tokens sets how many there are)", "kv_tokens"
        )
    return [file.read(size) for _ in range(count)]


def _register(engine: Engine, tokens: list[int], data: list[bytes], salt: str) -> None:
    blocks, size = engine.scheduler.blocks, engine.scheduler.blocks.block_size
    parent, taken = root_key(engine.checkpoint.fingerprint, engine.runner.kv.layout, salt), []
    for index, part in enumerate(data):
        piece = tokens[index * size : (index + 1) * size]
        key = chain_key(parent, piece)
        known = blocks.find(key)
        if known is None:
            block = blocks.allocate()
            engine.runner.kv.write_block(block, part)
            blocks.register(block, key, parent, piece)
        else:
            block = known
            blocks.share(block)
        taken.append(block)
        parent = key
    blocks.release(taken)


def _read_header(file: BinaryIO, engine: Engine, path: Path) -> dict[str, Any]:
    if file.read(len(MAGIC)) != MAGIC:
        raise ModelError(f"{path} is not a saved state of this version")
    length = int.from_bytes(file.read(8), "little")
    # What no cache of this size could have saved is not read at all: JSON takes twenty times its length in memory.
    blocks = engine.scheduler.blocks
    if length > HEADER_BYTES + TOKEN_BYTES * blocks.num_blocks * blocks.block_size:
        raise ModelError(f"{path} is damaged, or of a larger cache: its header would have {length:,} bytes")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: its header is not JSON") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is damaged: its header is no object")
    _check(header, engine, path)
    return header


def _check(header: dict[str, Any], engine: Engine, path: Path) -> None:
    kv, size = engine.runner.kv, engine.scheduler.blocks.block_size
    expected = {
        "model": engine.checkpoint.fingerprint,
        "layout": kv.layout,
        "block_size": size,
        "block_bytes": kv.block_bytes,
    }
    for name, value in expected.items():
        found = header.get(name)
        if found != value:
            told = repr(found)[:80] if isinstance(found, str | int | None) else f"a {type(found).__name__}"
            raise ModelError(f"{path} was saved with {name} {told}; here it is {value!r}")
    tokens, vocab_size = header.get("tokens"), engine.checkpoint.config.vocab_size
    are_tokens = isinstance(tokens, list) and all(type(t) is int and 0 <= t < vocab_size for t in tokens)
    if not isinstance(tokens, list) or not are_tokens or len(tokens) % size or "checksum" not in header:
        raise ModelError(f"{path} is damaged: its tokens are not whole blocks of this vocabulary")

"""Computed prompts on disk: a long system prompt is computed once a machine, not once a process.

    "unspool state 1\\n" · length of the header (8 bytes) · header (JSON) · block · block · …

The header names the model's fingerprint and the cache's layout, and a file is only good for the same of both: then
its blocks hold the very bits that computing them again would give. Full blocks are kept; the tokens of a last, partial
one are computed anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.cache.blocks import chain_key, root_key
from unspool.errors import EngineError, ModelError, RequestError

if TYPE_CHECKING:
    from unspool.engine.engine import Engine

MAGIC = b"unspool state 1\n"
MAX_HEADER = 64 << 20


def save(engine: Engine, prompt: Sequence[int], path: Path, salt: str = "") -> int:
    """Write the full blocks of a prompt that the prefix cache holds; how many tokens they are."""
    blocks, size = engine.scheduler.blocks, engine.scheduler.blocks.block_size
    key, found = root_key(engine.checkpoint.fingerprint, engine.runner.kv.layout, salt), []
    for start in range(0, len(prompt) - size + 1, size):
        key = chain_key(key, prompt[start : start + size])
        block = blocks.find(key)
        if block is None:
            break
        found.append(block)
    data = [engine.runner.kv.read_block(block) for block in found]
    digest = hashlib.blake2b(digest_size=16)
    for part in data:
        digest.update(part)
    header = json.dumps(
        {
            "model": engine.checkpoint.fingerprint,
            "layout": engine.runner.kv.layout,
            "block_size": size,
            "block_bytes": engine.runner.kv.block_bytes,
            "tokens": list(prompt[: len(found) * size]),
            "blocks": digest.hexdigest(),
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
    """Put a file's blocks into the prefix cache; the tokens they stand for."""
    kv, blocks = engine.runner.kv, engine.scheduler.blocks
    try:
        with open(path, "rb") as file:
            header = _read_header(file, path)
            _check(header, engine, path)
            tokens: list[int] = header["tokens"]
            count = len(tokens) // blocks.block_size
            if count > blocks.num_free:
                raise RequestError(
                    f"{path} holds {count:,} blocks; {blocks.num_free:,} are free (kv_tokens sets how many there are)",
                    "kv_tokens",
                )
            data = [file.read(kv.block_bytes) for _ in range(count)]
            if any(len(part) != kv.block_bytes for part in data) or file.read(1):
                raise ModelError(f"{path} is damaged: its blocks are not as long as its header says")
    except OSError as error:
        raise ModelError(f"cannot read the state {path}: {error.strerror or error}") from error
    if hashlib.blake2b(b"".join(data), digest_size=16).hexdigest() != header["blocks"]:
        raise ModelError(f"{path} is damaged: its blocks do not match their checksum")
    _register(engine, tokens, data, salt)
    return tokens


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


def _read_header(file: Any, path: Path) -> dict[str, Any]:
    if file.read(len(MAGIC)) != MAGIC:
        raise ModelError(f"{path} is not a saved state of this version")
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER:
        raise ModelError(f"{path} is damaged: its header would have {length:,} bytes")
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise ModelError(f"{path} is damaged: its header is not JSON") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is damaged: its header is no object")
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
        if header.get(name) != value:
            raise ModelError(f"{path} was saved with {name} {header.get(name)!r}; here it is {value!r}")
    tokens, vocab_size = header.get("tokens"), engine.checkpoint.config.vocab_size
    are_tokens = isinstance(tokens, list) and all(type(t) is int and 0 <= t < vocab_size for t in tokens)
    if (
        not isinstance(tokens, list)
        or not are_tokens
        or len(tokens) % size
        or not isinstance(header.get("blocks"), str)
    ):
        raise ModelError(f"{path} is damaged: its tokens are not whole blocks of this vocabulary")

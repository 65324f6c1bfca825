"""Computed prompts on disk: a long system prompt is computed once a machine, not once a process.

    "unspool state 3\\n" · length of the header (8 bytes) · header (JSON) · block · block · … · states

Where groups of layers have blocks of their own, the blocks of the first group come first. Of layers with a window, only
the last window of blocks is kept, so another prompt can begin where the file ends, and nowhere before.

The header names the model's fingerprint and the cache's layout, and a file is only good for the same of both: then
it holds the very bits that computing it again would give. Full blocks are kept; the tokens of a last, partial one are
computed anew. A model with recurrent layers begins from states, so for it the file goes as far as the prompt's longest
snapshot, to the token, and ends with the states there.
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
from unspool.engine.request import Request
from unspool.errors import EngineError, ModelError, RequestError

if TYPE_CHECKING:
    from unspool.cache.blocks import Blocks
    from unspool.engine.engine import Engine

MAGIC = b"unspool state 3\n"
HEADER_BYTES, TOKEN_BYTES = 65_536, 12  # a header's length: so much, and so much for each token


def save(engine: Engine, prompt: Sequence[int], path: Path, salt: str = "") -> int:
    """Write what the prefix cache holds of a computed prompt; how many tokens that is."""
    if not engine.config.prefix_cache:
        raise RequestError("prefix_cache is off, so no computed prompt is kept that could be saved", "prefix_cache")
    kv, size = engine.runner.kv, engine.scheduler.blocks.block_size
    count = len(prompt) // size * size
    data: list[bytes] = []
    if engine.scheduler.states is not None:
        engine.copy_states()
        request = Request(-1, prompt, root=_root(engine, salt))
        snapshot, count = engine.scheduler.states.find(request, len(prompt), len(prompt) // size)
        if snapshot is None:
            raise EngineError(
                "the cache no longer holds states of the prompt: others took their slots, and more memory "
                "(state_bytes) would have room for all"
            )
        data.append(kv.read_state(snapshot.slot))
    tokens = list(prompt[:count])
    found = _find_blocks(engine, tokens, len(prompt), salt)
    data = [kv.read_block(block, group) for group, blocks in enumerate(found) for block in blocks] + data
    header = json.dumps({**_expected(engine), "tokens": tokens, "checksum": _checksum(tokens, data)}).encode()
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
    return count


def _root(engine: Engine, salt: str) -> bytes:
    return root_key(engine.checkpoint.fingerprint, engine.runner.kv.layout, salt)


def _find_blocks(engine: Engine, tokens: Sequence[int], num_asked: int, salt: str) -> list[list[int]]:
    """The blocks of each group that a prompt needs which begins with these tokens. They may not fill the last block."""
    groups, size = engine.scheduler.tables.groups, engine.scheduler.blocks.block_size
    key = _root(engine, salt)
    found: list[list[int]] = [[] for _ in groups]
    for start in range(0, len(tokens), size):
        piece, parent = tokens[start : start + size], key
        key = chain_key(parent, piece)
        for group, blocks in zip(groups, found, strict=True):
            if start // size < group.first_needed(len(tokens)):
                continue
            block = group.find(key) if len(piece) == size else _find_whole(group, parent, piece)
            if block is None:
                raise EngineError(
                    f"the cache no longer holds the prompt: {start:,} of its {num_asked:,} tokens are left; "
                    "others took its blocks, and a larger cache (kv_tokens) would have room for all"
                )
            blocks.append(block)
    return found


def _find_whole(group: Blocks, parent: bytes, tokens: Sequence[int]) -> int | None:
    """A block that begins with all of these tokens."""
    block, count = group.find_partial(parent, tokens)
    return block if count == len(tokens) else None


def load(engine: Engine, path: Path, salt: str = "") -> list[int]:
    """Put a file's blocks into the prefix cache; the tokens they stand for.

    A checksum detects damage. It does not prove who saved the file: answers to these tokens are computed from its
    numbers, so a state file must be as trusted as the model.
    """
    try:
        if not path.is_file():  # opening a pipe would wait for a writer
            raise ModelError(f"cannot read the state {path}: it is no file, or not there")
        with open(path, "rb") as file:
            header = _read_header(file, engine, path)
            tokens: list[int] = header["tokens"]
            data = _read_data(file, len(tokens), engine, path)
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


def _read_data(file: BinaryIO, num_tokens: int, engine: Engine, path: Path) -> list[bytes]:
    """Blocks, and then states if the model has some."""
    kv, states = engine.runner.kv, engine.scheduler.states
    count = -(-num_tokens // kv.block_size)
    sizes: list[int] = []
    for group, nbytes in zip(engine.scheduler.tables.groups, kv.block_bytes, strict=True):
        sizes += [nbytes] * (count - group.first_needed(num_tokens))
    sizes += [] if states is None else [kv.state_bytes]
    if os.fstat(file.fileno()).st_size - file.tell() != sum(sizes):
        raise ModelError(f"{path} is damaged: its blocks are not as long as its header says")
    for group in engine.scheduler.tables.groups:
        needed = count - group.first_needed(num_tokens)
        if needed > group.num_free:
            raise RequestError(
                f"{path} holds {needed:,} blocks; {group.num_free:,} are free (kv_tokens sets how many there are)",
                "kv_tokens",
            )
    if states is not None and not states.slots.num_free:
        raise RequestError(
            f"{path} needs a state's slot; all {states.slots.num_slots:,} are in use (state_bytes sets how many there "
            "are)",
            "state_bytes",
        )
    return [file.read(size) for size in sizes]


def _register(engine: Engine, tokens: list[int], data: list[bytes], salt: str) -> None:
    groups, size = engine.scheduler.tables.groups, engine.scheduler.blocks.block_size
    rest, parent = iter(data), _root(engine, salt)
    for number, group in enumerate(groups):
        parent, held = _root(engine, salt), []
        for index in range(-(-len(tokens) // size)):
            piece = tokens[index * size : (index + 1) * size]
            key = chain_key(parent, piece)
            if index >= group.first_needed(len(tokens)):
                held.append(_take_in(engine, number, next(rest), key, parent, piece))
            parent = key if len(piece) == size else parent
        group.release(held)
    states = engine.scheduler.states
    if states is not None:
        engine.copy_states()
        slot = states.slots.allocate()
        engine.runner.kv.write_state(slot, data[-1])
        states.slots.store(slot, parent, tokens[len(tokens) // size * size :])


def _take_in(engine: Engine, number: int, data: bytes, key: bytes, parent: bytes, tokens: Sequence[int]) -> int:
    """A block of a group that holds these tokens: the one that is known, or another with `data`."""
    group = engine.scheduler.tables.groups[number]
    known = group.find(key)
    if known is not None:
        group.share(known)
        return known
    block = group.allocate()
    engine.runner.kv.write_block(block, data, number)
    group.register(block, key, parent, tokens)
    return block


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


def _expected(engine: Engine) -> dict[str, Any]:
    """What a file's header says, if it is good for this engine."""
    kv = engine.runner.kv
    return {
        "model": engine.checkpoint.fingerprint,
        "layout": kv.layout,
        "block_size": kv.block_size,
        "block_bytes": kv.block_bytes[0] if len(kv.block_bytes) == 1 else list(kv.block_bytes),
        "state_bytes": kv.state_bytes,
    }


def _check(header: dict[str, Any], engine: Engine, path: Path) -> None:
    for name, value in _expected(engine).items():
        found = header.get(name)
        if found != value:
            shown = repr(found)[:80] if isinstance(found, str | int | None) else f"a {type(found).__name__}"
            raise ModelError(f"{path} was saved with {name} {shown}; here it is {value!r}")
    tokens, vocab_size = header.get("tokens"), engine.checkpoint.config.vocab_size
    are_tokens = isinstance(tokens, list) and all(type(t) is int and 0 <= t < vocab_size for t in tokens)
    size = 1 if engine.scheduler.states is not None else engine.scheduler.blocks.block_size
    if not isinstance(tokens, list) or not are_tokens or len(tokens) % size or "checksum" not in header:
        raise ModelError(f"{path} is damaged: its tokens are not whole blocks of this vocabulary")

"""Models with random weights, for laws, tests and benchmarks that need only a shape. The same seed gives the same
bits."""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.models.checkpoint import Checkpoint
from unspool.models.registry import architecture_of, draft_head_of, metadata_of, tensor_shapes, tensors_of
from unspool.models.shapes import SHAPES
from unspool.suggest import nearest
from unspool.weights.formats import FORMATS
from unspool.weights.gguf_writer import write_gguf
from unspool.weights.weight import Weight, encode_weight

if TYPE_CHECKING:
    from unspool.text.tokenizer import Tokenizer

__all__ = [
    "SHAPES",
    "byte_vocabulary",
    "outline",
    "random_checkpoint",
    "shared_checkpoint",
    "stand_in",
    "write_random_gguf",
]

NUM_BYTES = 256
END = "<|endoftext|>"
# Tensors of recurrent layers: those that files store as matrices but models read as vectors; decay rates, which are
# negative; and tensors with values around one.
TABLES, DECAYS, UNIT = ("conv.weight", "conv1d.weight"), (".ssm_a",), (".ssm_d", ".ssm_norm.weight")
# A larger tensor is tiled from a pool instead of drawn: eight billion draws take minutes. The pool has a prime number
# of blocks, so that the first rows of a matrix all differ.
DRAWN = 1 << 19
POOL_BLOCKS = {1: 8_388_617, 32: 262_147, 128: 131_101, 256: 65_537}


def random_checkpoint(config: ModelConfig, *, format: str = "f32", seed: int = 0) -> Checkpoint:
    """A model in memory: matrices in `format`, vectors in f32, and a tokenizer whose first tokens are the 256 bytes."""
    if format not in FORMATS:
        raise ModelError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    pools: dict[float, np.ndarray] = {}

    def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
        return {
            name: _vector(name, shape[0], seed) if len(shape) == 1 else _matrix(name, shape, format, seed, pools)
            for name, shape in shapes.items()
        }

    return Checkpoint(
        path=Path(f"random:{config.architecture}"),
        name=f"random-{config.architecture}-{format}-{seed}",
        config=config,
        weights=drawn(tensor_shapes(config)),
        tokenizer=_tokenizer(config),
        chat_template=None,
        generation={},
        eos_ids=_ends(config),
        draft_weights=lambda: drawn(_draft_shapes(config)),
    )


def _draft_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the draft head's tensors, if the model has a draft head."""
    head = draft_head_of(config) if getattr(config, "extra_layers", 0) else None
    return {} if head is None else head.shapes(config, architecture_of(config))


def stand_in(spec: str) -> Checkpoint:
    """The model with random weights that `--random` names: a shape, and optionally a colon and a format (default bf16).

    Matrices share their numbers in memory, so that eight billion of them take a gigabyte and a second. Benchmarks with
    such a model measure the reading of bytes.
    """
    config, format, name = _parse(spec)
    return shared_checkpoint(config, format, name=name)


def stand_in_name(spec: str) -> str:
    """The model's name for a `--random` argument."""
    return _parse(spec)[2]


def _parse(spec: str) -> tuple[ModelConfig, str, str]:
    """A shape's config, the format, and the name of the model."""
    shape, _, format = spec.partition(":")
    format = format or "bf16"
    if shape not in SHAPES:
        known = [name for name in SHAPES if not name.startswith("tiny-")]
        raise ModelError(f"there is no shape {shape!r}{nearest(shape, SHAPES, 'there are ' + ', '.join(known))}")
    if format not in FORMATS:
        raise ModelError(f"unknown format {format!r}{nearest(format, FORMATS, 'known: ' + ', '.join(FORMATS))}")
    return SHAPES[shape], format, f"random-{shape}-{format}"


def outline(spec: str) -> Checkpoint:
    """The model that `--random` names, with only the sizes of its tensors: 70 billion weights take no memory.

    The weights lie in one memory area that was never written to, so they read as zeros.
    """
    config, format, name = _parse(spec)
    shapes = tensor_shapes(config)

    def format_of(shape: tuple[int, ...]) -> str:
        return "f32" if len(shape) == 1 else format

    for shape in shapes.values():
        if len(shape) > 1:
            _check_width(shape[-1], format)
    largest = max(FORMATS[format_of(shape)].nbytes(math.prod(shape)) for shape in shapes.values())
    area = memoryview(mmap.mmap(-1, largest))
    weights = {
        name: Weight(name, format_of(shape), shape, area[: FORMATS[format_of(shape)].nbytes(math.prod(shape))])
        for name, shape in shapes.items()
    }
    return Checkpoint(Path("random"), name, config, weights, _tokenizer(config), None, {}, _ends(config))


def _ends(config: ModelConfig) -> tuple[int, ...]:
    return (NUM_BYTES,) if config.vocab_size > NUM_BYTES else ()


def shared_checkpoint(config: ModelConfig, format: str = "bf16", *, name: str = "random") -> Checkpoint:
    kind, shapes = FORMATS[format], tensor_shapes(config)
    largest: dict[int, int] = {}
    for shape in shapes.values():
        if len(shape) > 1:
            _check_width(shape[-1], format)
            largest[shape[-1]] = max(largest.get(shape[-1], 0), math.prod(shape))
    pools = {width: _shared_pool(width, kind.nbytes(size), format) for width, size in largest.items()}

    def weight_of(name: str, shape: tuple[int, ...]) -> Weight:
        if name.endswith(DECAYS):
            return encode_weight(name, np.full(shape, -1, np.float32))
        if len(shape) == 1 or name.endswith(UNIT):
            return encode_weight(name, np.ones(shape, np.float32))
        return Weight(name, format, shape, pools[shape[-1]][: kind.nbytes(math.prod(shape))].data)

    weights = {name: weight_of(name, shape) for name, shape in shapes.items()}
    return Checkpoint(Path("random"), name, config, weights, _tokenizer(config), None, {}, _ends(config))


def _check_width(width: int, format: str) -> None:
    if width % FORMATS[format].block:
        raise ModelError(f"{format} has {FORMATS[format].block} values a block; this shape has matrices {width} wide")


def _shared_pool(width: int, size: int, format: str) -> np.ndarray:
    """Bytes of weights whose rows have a length of about one: a prime number of blocks, repeated."""
    kind = FORMATS[format]
    blocks = min(POOL_BLOCKS[kind.block], -(-size // kind.bytes_per_block))
    values = _generator(f"width {width}", 0).standard_normal((blocks, kind.block), dtype=np.float32)
    drawn = np.frombuffer(kind.encode(values / np.float32(math.sqrt(width))), np.uint8)
    return np.resize(drawn, size)


def write_random_gguf(path: str | Path, config: ModelConfig, *, format: str = "f32", seed: int = 0) -> None:
    """Write the same model to a file."""
    checkpoint = random_checkpoint(config, format=format, seed=seed)
    words = byte_vocabulary(config.vocab_size)
    weights = {**checkpoint.weights, **checkpoint.draft_weights(), **tensors_of(config)}
    write_gguf(path, metadata_of(config) | words, weights)


def _generator(name: str, seed: int) -> np.random.Generator:
    """A generator seeded by the tensor's name, so that a tensor's values do not depend on the other tensors."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _vector(name: str, size: int, seed: int) -> Weight:
    values = 0.1 * _generator(name, seed).standard_normal(size, dtype=np.float32)
    if name.endswith(DECAYS):
        return encode_weight(name, -1 - values)
    return encode_weight(name, values if name.endswith(".bias") else 1 + values)


def _matrix(name: str, shape: tuple[int, ...], format: str, seed: int, pools: dict[float, np.ndarray]) -> Weight:
    # Rows of unit length keep activations near one; twice that in the head makes some tokens clearly more likely.
    if name.endswith(TABLES) or shape[-1] % FORMATS[format].block:
        format = "f32"  # as converters do: these tensors have few values, and every row reads all of them
    if name.endswith((*DECAYS, *UNIT)):
        weight = _vector(name, math.prod(shape), seed)
        return Weight(name, weight.format, shape, weight.raw)
    deviation = (2 if name in ("token_embd.weight", "output.weight") else 1) / math.sqrt(shape[-1])
    generator = _generator(name, seed)
    if math.prod(shape) <= DRAWN:
        return encode_weight(name, deviation * generator.standard_normal(shape, dtype=np.float32), format)
    kind = FORMATS[format]
    if deviation not in pools:
        values = _generator("pool", seed).standard_normal((POOL_BLOCKS[kind.block], kind.block), dtype=np.float32)
        pools[deviation] = np.frombuffer(kind.encode(deviation * values), np.uint8)
    pool = pools[deviation]
    start = int(generator.integers(POOL_BLOCKS[kind.block])) * kind.bytes_per_block
    data = np.empty(kind.nbytes(math.prod(shape)), np.uint8)
    filled = 0
    while filled < data.size:
        piece = pool[start : start + data.size - filled]
        data[filled : filled + piece.size] = piece
        filled, start = filled + piece.size, 0
    return Weight(name, format, shape, data.data)


def byte_vocabulary(vocab_size: int) -> dict[str, Any]:
    """GGUF's keys for a byte-level vocabulary without merges: the bytes, an end token, then tokens that no text
    contains."""
    if vocab_size <= NUM_BYTES:
        raise ModelError(f"a vocabulary of {vocab_size} tokens has no room for {NUM_BYTES} bytes and an end token")
    extra = vocab_size - NUM_BYTES - 1
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*_byte_characters(), END, *(f"<|extra_{index}|>" for index in range(extra))],
        "tokenizer.ggml.token_type": [1] * NUM_BYTES + [3] + [5] * extra,  # normal, control, unused
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": NUM_BYTES,
        "tokenizer.ggml.eos_token_id": NUM_BYTES,
        "tokenizer.ggml.add_bos_token": False,
    }


def _byte_characters() -> list[str]:
    """The character for each byte in a byte-level vocabulary: itself if it is printable, else one after 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]


def _tokenizer(config: ModelConfig) -> Callable[[], Tokenizer]:
    def tokenizer() -> Tokenizer:
        from unspool.text.tokenizer import from_gguf

        return from_gguf(byte_vocabulary(config.vocab_size))

    return tokenizer

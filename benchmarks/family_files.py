"""GGUF files of random weights at the shapes of real models: the bytes of a model are all that its speed depends on.
Their tokenizer is that of SmolLM2, with names that no text produces up to the size of the vocabulary of the model, so
that every engine loads them and answers are text.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unspool.config import ModelConfig
from unspool.models.random import POOL_BLOCKS
from unspool.models.registry import family_of, metadata_of, tensor_shapes, tensors_of
from unspool.models.shapes import SHAPES
from unspool.weights.formats import FORMATS
from unspool.weights.gguf import open_gguf
from unspool.weights.gguf_writer import write_gguf
from unspool.weights.store import resolve
from unspool.weights.weight import Weight, encode_weight

CONTEXT = 8192  # at least: what is measured does not end at what a model was trained for
NORMAL = 1  # GGUF's kind of a token that is text


@dataclass(frozen=True)
class Stand:
    """A real model's shape, and the formats that its file stores matrices in."""

    shape: str
    layers: int | None = None  # fewer than the model has; None: all
    format: str = "q4_k"
    experts: str | None = None  # None: as the others
    table: str = "q6_k"  # of the embedding and of the head

    @property
    def config(self) -> ModelConfig:
        config = SHAPES[self.shape]
        config = replace(
            config,
            rope_style=family_of(config.architecture).gguf_rope_style,  # random weights know no order
            context_length=max(config.context_length, CONTEXT),
        )
        if self.layers is None:
            return config
        sliding = None if config.sliding_layers is None else config.sliding_layers[: self.layers]
        return replace(config, num_layers=self.layers, sliding_layers=sliding)

    def format_of(self, name: str, shape: tuple[int, ...]) -> str:
        """As llama.cpp's converter and quantizer store a tensor of this name."""
        if len(shape) == 1 or name.endswith((".bias", "ffn_gate_inp.weight", "conv.weight", "conv1d.weight")):
            return "f32"
        if name in ("token_embd.weight", "output.weight"):
            return self.table
        return self.experts or self.format if "_exps." in name else self.format


STANDS = {
    "llama-1b": Stand("llama-1b"),
    "lfm2-350m": Stand("lfm2-350m"),
    "granite-1b-a400m": Stand("granite-1b-a400m"),
    "olmoe-1b-7b": Stand("olmoe-1b-7b"),
    "qwen3.5-0.8b": Stand("qwen3.5-0.8b"),
    "gpt-oss-4-layers": Stand("gpt-oss-20b", layers=4, format="q8_0", experts="mxfp4", table="q8_0"),
    "gemma4-e2b": Stand("gemma4-e2b"),
}


def write(stand: Stand, path: Path) -> None:
    config = stand.config
    metadata = metadata_of(config) | _vocabulary(config.vocab_size)
    write_gguf(path, metadata, _Tensors(stand, config))


def _vocabulary(size: int) -> dict[str, Any]:
    keys = open_gguf(resolve("smollm2")).metadata
    found = {key: value for key, value in keys.items() if key.startswith("tokenizer.")}
    for key in ("tokens", "token_type", "merges"):
        found[f"tokenizer.ggml.{key}"] = list(found[f"tokenizer.ggml.{key}"])
    tokens = found["tokenizer.ggml.tokens"]
    if size < len(tokens):
        raise ValueError(f"a vocabulary of {size:,} tokens has no room for SmolLM2's {len(tokens):,}")
    more = size - len(tokens)
    found["tokenizer.ggml.tokens"] = tokens + [f"no-word-{number}" for number in range(more)]
    found["tokenizer.ggml.token_type"] += [NORMAL] * more
    return found


class _Tensors(Mapping[str, Weight]):
    """Made when they are asked for, so that a file of 4 GB takes the memory of its largest tensor."""

    def __init__(self, stand: Stand, config: ModelConfig) -> None:
        self._stand, self._shapes, self._own = stand, tensor_shapes(config), tensors_of(config)
        self._pools: dict[tuple[str, float], np.ndarray] = {}  # drawn and encoded once, then repeated

    def __getitem__(self, name: str) -> Weight:
        if name in self._own:
            return self._own[name]
        shape = self._shapes[name]
        format = self._stand.format_of(name, shape)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if len(shape) == 1:
            return encode_weight(name, self._vector(name, shape[0], rng))
        pool = self._pool(format, 1 / math.sqrt(shape[-1]))
        block = FORMATS[format].bytes_per_block
        start = int(rng.integers(pool.size // block)) * block
        data = np.empty(FORMATS[format].nbytes(math.prod(shape)), np.uint8)
        filled = 0
        while filled < data.size:
            piece = pool[start : start + data.size - filled]
            data[filled : filled + piece.size] = piece
            filled, start = filled + piece.size, 0
        return Weight(name, format, shape, data.data)

    @staticmethod
    def _vector(name: str, size: int, rng: np.random.Generator) -> np.ndarray:
        values = 0.1 * rng.standard_normal(size, dtype=np.float32)
        if name.endswith(".ssm_a"):
            return -1 - values  # rates of decay
        return values if name.endswith((".bias", "attn_sinks.weight")) else 1 + values

    def _pool(self, format: str, deviation: float) -> np.ndarray:
        if (format, deviation) not in self._pools:
            kind = FORMATS[format]
            values = np.random.default_rng(0).standard_normal((POOL_BLOCKS[kind.block], kind.block), dtype=np.float32)
            self._pools[format, deviation] = np.frombuffer(kind.encode(np.float32(deviation) * values), np.uint8)
        return self._pools[format, deviation]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._shapes, *self._own])

    def __len__(self) -> int:
        return len(self._shapes) + len(self._own)

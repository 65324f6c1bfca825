"""Tiny models that transformers wrote, as GGUF files, and what models compute of their tokens, piece by piece.

scripts/fixture_families.py makes the fixtures; nothing here needs torch or transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from unspool.config import EngineConfig
from unspool.models.checkpoint import Checkpoint
from unspool.models.qwen3_5 import DeltaConfig, Qwen35
from unspool.models.random import byte_vocabulary
from unspool.models.registry import build, family_of, metadata_of, tensors_of
from unspool.ops import Batch, Ops
from unspool.weights.gguf import write_gguf
from unspool.weights.weight import Weight, encode_weight

FIXTURES = Path(__file__).parent.parent / "fixtures" / "families"
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())
# GGUF files cannot say what these differ by.
NOT_IN_GGUF = (
    "llama-gelu",
    "llama-gelu-tanh",
    "ministral",
    "qwen2-moe-sliding",
    "qwen2-sliding",
    "qwen3-moe-dense",
    "qwen3-sliding",
)
IN_GGUF = [name for name in NAMES if name not in NOT_IN_GGUF]
STACKED = r"(_exps|altup_proj|altup_unembd_proj)\.\d+\."
BLOCK = 16


def expected_of(name: str) -> Mapping[str, np.ndarray]:
    return np.load(FIXTURES / name / "expected.npz")


def rows_of(
    checkpoint: Checkpoint, ops: Ops, ids: np.ndarray, pieces: Sequence[int], kv_dtype: Any = "f32"
) -> np.ndarray:
    """Logits of every token, computed piece by piece."""
    model = build(checkpoint.config, checkpoint.weights, ops)
    engine = EngineConfig(kv_dtype=kv_dtype, block_size=BLOCK).with_device_defaults(ops.name)
    num_blocks = -(-sum(pieces) // BLOCK)
    kv = ops.kv_cache(model.architecture.storage, engine, num_blocks, num_states=1)
    step = ops.compile(model, kv)
    found, start = [], 0
    for count in pieces:
        positions = np.arange(start, start + count, dtype=np.int32)
        batch = Batch(
            ids=ids[start : start + count].astype(np.int32),
            positions=positions,
            slots=positions.astype(np.int64),
            starts=np.array([0, count], np.int32),
            tables=np.arange(num_blocks, dtype=np.int32)[None],
            logit_rows=np.arange(count, dtype=np.int32),
            states=np.zeros(1, np.int32),
        )
        found.append(np.array(step.run(batch)))
        start += count
    return np.concatenate(found)


def logprobs_of(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Of each token but the first, after those before it."""
    rows = logits[: len(ids) - 1].astype(np.float64)
    most = rows.max(axis=1)
    norm = most + np.log(np.exp(rows - most[:, None]).sum(axis=1))
    return rows[np.arange(len(rows)), ids[1:]] - norm


def write_as_gguf(path: Path, checkpoint: Checkpoint, *, vocabulary: bool = False) -> None:
    """The checkpoint by GGUF's conventions: experts in one tensor, q and k permuted where channels rotate in pairs,
    heads of values in another order where GGUF has them so."""
    config, family = checkpoint.config, family_of(checkpoint.config.architecture)
    style = family.gguf_rope_style
    weights = stacked(checkpoint.weights)
    if isinstance(config, DeltaConfig) and isinstance(family, Qwen35) and family.gguf_tiled:
        config = replace(config, tiled=True)
        weights |= tiled(weights, config)
    if config.rope_dim and style != config.rope_style:
        config = replace(config, rope_style=style)
        for name, weight in weights.items():
            if ".attn_q." in name or ".attn_k." in name:
                values = weight.dequantize()
                heads = values.reshape(-1, 2, config.head_dim // 2, *values.shape[1:]).swapaxes(1, 2)
                weights[name] = encode_weight(name, heads.reshape(values.shape), weight.format)
    words = byte_vocabulary(config.vocab_size) if vocabulary else {}
    write_gguf(path, metadata_of(config) | words, weights | tensors_of(config))


def tiled(weights: Mapping[str, Weight], config: DeltaConfig) -> dict[str, Weight]:
    """Tensors of gated delta nets with the value heads of one key head not beside each other, but that many apart."""
    size, keys = config.delta_value_dim, 2 * config.delta_key_heads * config.delta_key_dim
    group = config.delta_heads // config.delta_key_heads
    heads = np.arange(config.delta_heads).reshape(-1, group).T.reshape(-1)
    channels = (heads[:, None] * size + np.arange(size)).reshape(-1)
    behind_keys = np.concatenate([np.arange(keys), keys + channels])
    rows = {"attn_qkv": behind_keys, "ssm_conv1d": behind_keys, "attn_gate": channels}
    rows |= dict.fromkeys(("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"), heads)
    result = {}
    for name, weight in weights.items():
        part = name.split(".")[2] if name.startswith("blk.") else ""
        recurrent = not config.attention_layers[int(name.split(".")[1])] if part else False
        if recurrent and part in rows:
            result[name] = encode_weight(name, weight.dequantize()[rows[part]], weight.format)
        elif recurrent and part == "ssm_out":
            result[name] = encode_weight(name, weight.dequantize()[:, channels], weight.format)
    return result


def stacked(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Experts that are stored one by one as one tensor, and what else GGUF has in one."""
    result: dict[str, Weight] = {}
    for name, weight in weights.items():
        whole = re.sub(STACKED, r"\1.", name)
        if whole == name:
            result[name] = weight
        elif whole not in result:
            names = [each for each in weights if re.sub(STACKED, r"\1.", each) == whole]
            names.sort(key=lambda each: int(each.split(".")[-2]))
            raw = b"".join(bytes(weights[each].raw) for each in names)
            result[whole] = Weight(whole, weight.format, (len(names), *weight.shape), memoryview(raw))
    return result

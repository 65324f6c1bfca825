"""Latent attention becomes kernels: rows are assembled and rotated, then attention, then one product per head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unspool.errors import BackendError
from unspool.ops import AttentionSpec
from unspool.ops.cuda import steps
from unspool.ops.cuda.device_experts import DeviceExperts
from unspool.ops.cuda.geometry import depth_of, heads_of, pairs_of, prompt_rows
from unspool.ops.cuda.latent import head_products_kernel, latent_attention_kernel, latent_rows_kernel
from unspool.ops.cuda.launch import Launch, descriptor, is_interpreted, multiprocessors, next_power
from unspool.ops.cuda.layout import Shared
from unspool.ops.cuda.plane_layout import tile_columns
from unspool.ops.cuda.sources import Sources
from unspool.ops.graph import LinearHeads

FEW_ROWS = 64  # rows that a head's matrix is multiplied by in one tile


def rows_launch(
    spec: AttentionSpec,
    sources: Sources,
    values: Sequence[Tensor],
    table: Tensor,
    q: Tensor,
    shared: Shared,
    more: dict[str, Any],
    rows: int,
) -> Launch:
    """`more`: rotations, slots and positions."""
    turned, pairs = spec.head_dim - spec.value_dim, pairs_of(spec)
    if 2 * pairs > turned:
        raise BackendError(f"layer {spec.layer} rotates {2 * pairs} channels of keys; only {turned} are not latents")
    names, given = ("a", "b", "c"), [*values, values[0], values[0]][:3]
    args: dict[str, Any] = dict(zip(names, given, strict=True)) | more
    args |= {name.upper(): each.shape[1] for name, each in zip(names, given, strict=True)}
    args |= {"table": table, "q": q, "keys": shared.kv.layer(spec.layer), "HEADS": spec.num_heads}
    args |= {"KEY": spec.head_dim, "LATENT": spec.value_dim, "ROPE_PAIRS": pairs}
    args |= {"INTERLEAVED": spec.rope is not None and spec.rope.style == "interleaved"}
    args |= {"GROWTH": float(spec.growth), "PERIOD": spec.period}
    args |= {"DT": next_power(max(turned, 1)), "DL": next_power(spec.value_dim)}
    return Launch(latent_rows_kernel, (rows, spec.num_heads + 1), args, warps=1, label="latent-rows")


def attention_launches(
    spec: AttentionSpec, q: Tensor, out: Tensor, shared: Shared, rows: int, *, is_late: bool, has_prompts: bool
) -> list[Launch]:
    kv, kind = shared.kv, shared.kinds[heads_of(spec)]
    keys, turned = kv.layer(spec.layer).view(-1, spec.head_dim), spec.head_dim - spec.value_dim
    width, depth = max(next_power(turned), 16), depth_of(spec)
    of_turned = of_latents = None
    if kv.block_size % steps.KEYS == 0 and width == turned and depth == spec.value_dim:
        of_turned = descriptor(keys, steps.KEYS, width)
        of_latents = descriptor(keys, steps.KEYS, depth)
    partial, items = shared.attention_partial[kind], steps.HEADER * kind
    args = {"q": q, "keys": keys, "of_turned": of_turned, "of_latents": of_latents, "out": out, "step": shared.step}
    args |= {"partial": partial, "capacity": partial.shape[1], "scale": float(spec.scale), "softcap": spec.softcap}
    args |= {"sinks": spec.sinks, "HEADS": spec.num_heads, "KV_HEADS": heads_of(spec)[1], "KEY": spec.head_dim}
    args |= {"LATENT": spec.value_dim, "DT": width, "DL": depth, "BLOCK_SIZE": kv.block_size}
    args |= {"WINDOW": spec.window or 0, "N": steps.KEYS, "SPLIT": steps.SPLIT, "TABLE": shared.table_of(spec)}
    few = {"header": shared.step[items + (steps.LAST_ITEMS if is_late else steps.FEW_ITEMS) :]}
    few |= {"T": shared.shapes[kind].decode_rows, "ALONE": is_interpreted()}
    programs = 1 if is_interpreted() else multiprocessors()
    launches = [Launch(latent_attention_kernel, (programs,), args | few, warps=4, stages=2, label="latent-attention")]
    if has_prompts:
        many = {"header": shared.step[items + steps.MANY_ITEMS :], "T": prompt_rows(spec), "ALONE": is_interpreted()}
        label = "latent-attention-prompt"
        launches.append(
            Launch(latent_attention_kernel, (multiprocessors(),), args | many, warps=8, stages=2, label=label)
        )
    return launches


def heads_launch(node: LinearHeads, x: Tensor, out: Tensor, rows: int) -> Launch:
    matrices = node.matrices
    assert isinstance(matrices, DeviceExperts)
    is_few = rows <= FEW_ROWS
    features, tokens = (64 if is_few else 128), (max(next_power(rows), 16) if is_few else 128)
    columns, at_once = matrices.columns_at_once(tokens, is_few=is_few)
    args = matrices.operands(features, at_once) | {"x": x, "out": out, "num_rows": rows}
    args |= {"features": matrices.out_features, "each": matrices.rows_each, "width": matrices.planes.width}
    args |= {"size": matrices.in_features, "HEADS": matrices.count, "FORMAT": matrices.format}
    args |= {"TILE": tile_columns(matrices.planes.width), "FEW": is_few, "F": features, "T": tokens, "K": columns}
    grid = (matrices.count * -(-matrices.out_features // features), -(-rows // tokens))
    values = rows * matrices.count * (matrices.in_features + matrices.out_features)
    cost = {"bytes": matrices.planes.nbytes + 2 * values}
    cost["flops"] = 2 * rows * matrices.count * matrices.in_features * matrices.out_features
    room = {"warps": 4 if is_few else 8, "stages": 4 if tokens <= 64 else 3}
    return Launch(head_products_kernel, grid, args, label="heads-product", **room, **cost)

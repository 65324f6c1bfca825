"""Models of unusual layers, on every backend: the fast ones compute what the reference does, one token or many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.ops.conftest import ISAS, distance, make_batch
from unspool.config import EngineConfig
from unspool.models.altup import AltUp, AltUpLayer, CutGlu, Laurel
from unspool.models.decoder import Decoder, tensor_shapes
from unspool.models.layers import Architecture, Attention, Glu, Layer, LayerNorm, Mlp, RmsNorm, TokenInput, TokenInputs
from unspool.models.mla import Mla
from unspool.models.moe import Moe
from unspool.models.recurrent import DeltaNet, Mamba2, ShortConv
from unspool.models.registry import architecture_of
from unspool.models.rotary import Rotary
from unspool.models.shapes import TINY
from unspool.models.tensors import TensorReader
from unspool.ops import Ops
from unspool.ops.reference import ReferenceOps
from unspool.ops.routing import Routing
from unspool.ops.storage import KeyValues, State, Storage, describe, state_bytes
from unspool.weights.weight import Weight, encode_weight

NORM = RmsNorm(1e-5)
HIDDEN, VOCABULARY = 64, 96


def rotary(dim: int, theta: float = 10_000.0) -> Rotary:
    return Rotary(dim, theta, "half")


def layer_of(mixer: Any, **changes: Any) -> Layer:
    return replace(Layer(mixer, Glu(96), norm=NORM, ffn_norm=NORM), **changes)


ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=16, rotary=rotary(16))
# Layers of other heads, wider heads, a cache that two layers read, and a window that differs.
GEOMETRIES = (
    layer_of(ATTENTION),
    layer_of(Attention(2, 1, 32, rotary(32, 1e6), window=5)),
    layer_of(replace(ATTENTION, kv_layer=0)),
    layer_of(Attention(3, 3, 16, rotary(16))),
)
PARALLEL = layer_of(ATTENTION, ffn_norm=None, parallel=True)
MODELS = {
    "geometries": GEOMETRIES,
    "no rotation": (layer_of(replace(ATTENTION, rotary=None)), layer_of(ATTENTION)),
    "partial rotation": (
        layer_of(replace(ATTENTION, rotary=rotary(8))),
        layer_of(replace(ATTENTION, rotary=rotary(4))),
    ),
    "layer norms": tuple(layer_of(ATTENTION, norm=LayerNorm(1e-5), ffn_norm=LayerNorm(1e-5, bias=False)) for _ in "ab"),
    "norms without weight": (
        layer_of(ATTENTION, norm=RmsNorm(1e-5, weight=False), ffn_norm=LayerNorm(1e-5, False, False)),
    ),
    "norms after": tuple(
        layer_of(ATTENTION, norm=None, ffn_norm=None, post_norm=NORM, ffn_post_norm=NORM) for _ in "ab"
    ),
    "norms before and after": tuple(layer_of(ATTENTION, post_norm=NORM, ffn_post_norm=NORM) for _ in "ab"),
    "parallel": (PARALLEL, PARALLEL),
    "parallel with two norms": (layer_of(ATTENTION, parallel=True), layer_of(ATTENTION, parallel=True)),
    "a scaled residual": (layer_of(ATTENTION, residual_scale=0.25), layer_of(ATTENTION, residual_scale=0.25)),
    "biases": tuple(
        layer_of(replace(ATTENTION, qkv_bias=True, output_bias=True), ffn=Glu(96, "gelu", bias=True)) for _ in "ab"
    ),
    "fused tensors": (layer_of(replace(ATTENTION, fused=True, qkv_bias=True), ffn=Glu(96, fused=True, bias=True)),),
    **{
        f"a feed-forward without gate: {activation}": (layer_of(ATTENTION, ffn=Mlp(96, activation, bias=True)),) * 2
        for activation in ("gelu", "gelu_tanh", "relu", "relu2", "silu")
    },
    "a clamped gate": (layer_of(ATTENTION, ffn=Glu(96, "clamped_swiglu", bias=True)),),
    "sinks": tuple(layer_of(replace(ATTENTION, sinks=True, window=window)) for window in (4, None)),
    "a cap on scores": (layer_of(replace(ATTENTION, softcap=2.0)),),
    "gates": (layer_of(replace(ATTENTION, gate=True, qk_norm=NORM)),) * 2,
    "norms of heads": (
        layer_of(replace(ATTENTION, qk_norm=NORM)),
        layer_of(replace(ATTENTION, qk_norm=LayerNorm(1e-5, bias=False))),
    ),
    "norms of each head": (layer_of(replace(ATTENTION, qk_norm=LayerNorm(1e-5, bias=False), norm_over="each head")),),
    "norms of rows": (layer_of(replace(ATTENTION, qk_norm=NORM, norm_over="row")),) * 2,
    "norms of values": (layer_of(replace(ATTENTION, qk_norm=NORM, v_norm=RmsNorm(1e-5, weight=False))),) * 2,
    "keys that are values": (
        layer_of(replace(ATTENTION, keys_are_values=True, qk_norm=NORM, v_norm=RmsNorm(1e-5, weight=False))),
        layer_of(replace(ATTENTION, kv_layer=0, qk_norm=NORM)),
    ),
    "queries that grow": (layer_of(replace(ATTENTION, growth=0.3, period=4)),),
}
WHOLE = {
    "learned positions": {"num_positions": 48},
    "scales": {"embedding_scale": 8.0, "logit_scale": 0.5, "logit_softcap": 3.0},
    "a norm of embeddings, a bias of the head": {"embedding_norm": LayerNorm(1e-5), "head_bias": True},
    "inputs of each token, and a scale of each layer": {
        "token_inputs": TokenInputs(16),
    },
    "a stream of parts": {
        "streams": AltUp(3, 1, NORM),
        "token_inputs": TokenInputs(16, num_tokens=90),
    },
    "a last norm with a bias, and a tied head": {"norm": LayerNorm(1e-5), "tied_embeddings": True},
}
RECURRENT = {
    "short convolutions": (layer_of(ShortConv(64, 3)), layer_of(ATTENTION), layer_of(ShortConv(64, 4))),
    "delta nets": (
        layer_of(DeltaNet(4, 2, 16, 24, 4, 1e-5, tiled=True)),
        layer_of(ATTENTION),
        layer_of(DeltaNet(2, 2, 8, 96, 4, 1e-5, tiled=False)),
    ),
    "delta nets with joint gates": (layer_of(DeltaNet(4, 2, 16, 16, 4, 1e-5, tiled=False, joint_gates=True)),) * 2,
    "scans": (
        layer_of(Mamba2(6, 16, 8, 2, 4, 1e-5, norm_groups=2)),
        layer_of(Mamba2(2, 80, 32, 1, 3, 1e-5), ffn=None),
    ),
}
LATENT = Mla(4, latent_dim=32, plain_dim=16, value_dim=24, rotary=Rotary(16, 1e4, "interleaved"), scale=0.2, norm=NORM)
# All experts of a row are used: which ones, would depend on how keys and values are rounded.
EXPERTS = Moe(Routing(3, 3), 48, "relu2", shared_width=40, gated=False)
OTHER_MODELS = {
    "experts without gates": (layer_of(ATTENTION, ffn=EXPERTS, residual_scale=0.5),) * 2,
    "experts that read latents": (layer_of(ATTENTION, ffn=replace(EXPERTS, latent=32), residual_scale=0.5),) * 2,
    "blocks of their own": (
        Layer(Mamba2(6, 16, 8, 2, 4, 1e-5), None, norm=NORM),
        Layer(None, Mlp(96, "relu2"), ffn_norm=NORM, ffn_norm_name="attn_norm"),
        Layer(ATTENTION, None, norm=NORM),
        Layer(None, EXPERTS, ffn_norm=NORM),
    ),
    "latents": (layer_of(LATENT), layer_of(replace(LATENT, query_dim=40, growth=0.3, period=4)), layer_of(ATTENTION)),
    "values of other sizes": (layer_of(replace(ATTENTION, value_dim=32)), layer_of(ATTENTION)),
    **RECURRENT,
}


def architecture(layers: Sequence[Layer], **changes: Any) -> Architecture:
    if "streams" in changes:
        layers = [in_parts(layer, changes["streams"], cuts=index == 0) for index, layer in enumerate(layers)]
    elif "token_inputs" in changes:
        taken = TokenInput(changes["token_inputs"].width, "gelu_tanh", NORM)
        layers = [*(replace(layer, scaled=True) for layer in layers[:-1]), replace(layers[-1], token_input=taken)]
    return replace(Architecture(VOCABULARY, HIDDEN, tuple(layers), NORM, tied_embeddings=False), **changes)


def in_parts(layer: Layer, streams: AltUp, *, cuts: bool) -> Layer:
    """The same layer of a stream of parts; `cuts`: gates of its feed-forward are cut off."""
    ffn = CutGlu(96, "gelu_tanh", 0.7) if cuts else layer.ffn
    norms = dict.fromkeys(("norm", "post_norm", "ffn_norm", "ffn_post_norm"), NORM)
    token_input = TokenInput(16, "gelu_tanh", NORM)
    return AltUpLayer(layer.mixer, ffn, **norms, token_input=token_input, streams=streams, laurel=Laurel(24, NORM))


def random_weights(model: Architecture, seed: int, format: str = "f32") -> dict[str, Weight]:
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in tensor_shapes(TINY, model).items():
        values = rng.standard_normal(shape).astype(np.float32)
        if name.endswith("ssm_a"):  # rates of decay
            weights[name] = encode_weight(name, -np.exp(values), "f32")
            continue
        values = values / math.sqrt(shape[-1]) if len(shape) > 1 else 0.3 * values + (not name.endswith(".bias"))
        is_matrix = len(shape) > 1 and shape[-1] % 16 == 0
        weights[name] = encode_weight(name, values, format if is_matrix else "f32")
    return weights


def run(ops: Ops, model: Architecture, weights: dict[str, Weight], kv_dtype: Any, pieces: Sequence[int]) -> np.ndarray:
    """Logits of every token of a sequence that is computed piece by piece, and of one beside it."""
    engine = EngineConfig(kv_dtype=kv_dtype, block_size=16).with_device_defaults(ops.name)
    kv = ops.kv_cache(model.storage, engine, 8, num_states=4)
    step = ops.compile(Decoder(TINY, model, TensorReader(ops, weights)), kv)
    ids = np.random.default_rng(3).integers(VOCABULARY, size=40).astype(np.int32)
    logits, start = [], 0
    for count in pieces:
        batch = make_batch([(0, 3, (6, 7)), (start, count, (0, 1, 2))], 16)
        batch = replace(batch, ids=np.concatenate([ids[:3], ids[start : start + count]]))
        logits.append(np.array(step.run(batch))[3:])
        start += count
    return np.concatenate(logits)


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "q8"])
@pytest.mark.parametrize("name", [*MODELS, *OTHER_MODELS, *WHOLE])
def test_the_cpu_computes_what_the_reference_does(name: str, kv_dtype: str, isa: str) -> None:
    from unspool.ops.cpu import CpuOps

    models = MODELS | OTHER_MODELS
    model = architecture(models[name]) if name not in WHOLE else architecture(GEOMETRIES, **WHOLE[name])
    weights = random_weights(model, seed=1)
    expected = run(ReferenceOps(), model, weights, "f32", [20, 1, 1])
    found = run(CpuOps(threads=2, isa=isa), model, weights, kv_dtype, [20, 1, 1])
    assert distance(found, expected) < {"f32": 1e-5, "f16": 1e-3, "q8": 0.03}[kv_dtype]
    pieces = run(CpuOps(threads=1, isa=isa), model, weights, kv_dtype, [7, 13, 2])
    assert np.array_equal(found, pieces), "how a prompt is cut changes no bit"


@pytest.mark.parametrize("name", [*MODELS, *RECURRENT])
def test_the_reference_computes_pieces_alike(name: str) -> None:
    model = architecture((MODELS | RECURRENT)[name])
    weights = random_weights(model, seed=1)
    whole, pieces = (run(ReferenceOps(), model, weights, "f16", each) for each in ([22], [7, 13, 2]))
    assert np.array_equal(whole, pieces)


def test_blocks_are_copied_saved_and_restored() -> None:
    from unspool.ops.cpu import CpuOps

    model = architecture(GEOMETRIES)
    for ops in (ReferenceOps(), *(CpuOps(threads=1, isa=isa) for isa in ISAS[:1])):
        kv = ops.kv_cache(model.storage, EngineConfig(kv_dtype="f32").with_device_defaults(ops.name), 3)
        data = np.random.default_rng(0).integers(256, size=kv.block_bytes[0], dtype=np.uint8).tobytes()
        kv.write_block(0, data)
        kv.copy_block(0, 2)
        assert kv.read_block(2) == data
        assert kv.read_block(1) == bytes(kv.block_bytes[0])


def test_a_layout_names_what_layers_keep() -> None:
    assert describe(architecture_of(TINY).storage) == "2x2x16"
    assert describe(architecture(GEOMETRIES).storage) == "1x2x16+1x1x32+1+1x3x16"
    assert describe(architecture(OTHER_MODELS["values of other sizes"]).storage) == "1x2x16/32+1x2x16"


def test_states_are_cleared_copied_saved_and_restored() -> None:
    from unspool.ops.cpu import CpuOps

    states = (State("conv", (3, 8)), State("memory", (2, 5, 7)))
    layers = (Storage(states=states), Storage(KeyValues(2, 16, 16)), Storage(KeyValues(1, 16, 16), states[:1]))
    for ops in (ReferenceOps(), *(CpuOps(threads=1, isa=isa) for isa in ISAS[:1])):
        kv = ops.kv_cache(layers, EngineConfig(kv_dtype="f32").with_device_defaults(ops.name), 2, num_states=3)
        assert kv.state_bytes >= state_bytes(layers) == 4 * (24 + 70 + 24)
        data = np.random.default_rng(0).integers(256, size=kv.state_bytes, dtype=np.uint8).tobytes()
        kv.write_state(1, data)
        kv.copy_state(1, 2)
        kv.clear_state(1)
        assert kv.read_state(2) == data
        assert kv.read_state(1) == kv.read_state(0) == bytes(kv.state_bytes)


def run_from(ops: Ops, name: str, plan: Sequence[tuple[int, int, int, dict[int, int]]]) -> np.ndarray:
    """Logits of pieces of one sequence: (first position, rows, state, saves by row)."""
    model = architecture(RECURRENT[name])
    kept: Any = "f16" if ops.name == "cuda" else "f32"
    engine = EngineConfig(kv_dtype=kept, block_size=16).with_device_defaults(ops.name)
    kv = ops.kv_cache(model.storage, engine, 8, num_states=4)
    step = ops.compile(Decoder(TINY, model, TensorReader(ops, random_weights(model, seed=1))), kv)
    ids, found = np.random.default_rng(3).integers(VOCABULARY, size=40).astype(np.int32), []
    for start, count, state, saves in plan:
        batch = make_batch([(start, count, (0, 1, 2))], 16)
        rows = np.array([saves.get(row, -1) for row in range(count)], np.int32)
        batch = replace(batch, ids=ids[start : start + count], states=np.array([state], np.int32), saves=rows)
        found.append(np.array(step.run(batch)))
    return np.concatenate(found)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_saved_state_is_where_a_sequence_goes_on(name: str, isa: str) -> None:
    from unspool.ops.cpu import CpuOps

    for ops in (ReferenceOps(), CpuOps(threads=2, isa=isa)):
        straight = run_from(ops, name, [(0, 20, 3, {})])
        resumed = run_from(ops, name, [(0, 20, 0, {11: 2, 4: 1}), (12, 8, 2, {}), (5, 15, 1, {})])
        assert np.array_equal(resumed, np.concatenate([straight, straight[12:], straight[5:]]))


@pytest.mark.skipif("avx512" not in ISAS, reason="this processor has one kernel set of sixteen lanes alone")
@pytest.mark.parametrize("name", RECURRENT)
def test_kernel_sets_agree_on_states_to_the_last_bit(name: str) -> None:
    from unspool.ops.cpu import CpuOps

    model = architecture(RECURRENT[name])
    found = [
        run(CpuOps(threads=1, isa=isa), model, random_weights(model, seed=2), "f32", [9, 1, 5])
        for isa in ("avx512", "avx2")
    ]
    assert np.array_equal(*found)

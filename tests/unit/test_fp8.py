"""8-bit floats: the codes, the blocks that carry their scales, and checkpoints that store scales beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.errors import ModelError
from unspool.events import Finished, Text
from unspool.models.checkpoint import open_checkpoint
from unspool.models.quantize import quantize, quantize_weight
from unspool.models.random import SHAPES, random_checkpoint
from unspool.params import SamplingParams
from unspool.weights import fp8
from unspool.weights.fp8_scales import own_scales
from unspool.weights.safetensors import open_safetensors, write_safetensors
from unspool.weights.weight import Weight, encode_weight


def test_codes_are_what_they_say() -> None:
    assert fp8.values()[[0x00, 0x01, 0x08, 0x38, 0x7E, 0xB8]].tolist() == [0, 2**-9, 2**-6, 1, 448, -1]
    assert np.isnan(fp8.values()[[0x7F, 0xFF]]).all()
    known = np.delete(np.arange(256), [0x7F, 0xFF])
    assert fp8.encode(fp8.values()[known]).tolist() == known.tolist()


@pytest.mark.parametrize(
    ("value", "nearest"), [(1.0625, 1.0), (1.1875, 1.25), (1.07, 1.125), (1e9, 448), (2**-10, 0), (3 * 2**-10, 2**-8)]
)
def test_values_go_to_the_nearest_code(value: float, nearest: float) -> None:
    codes = fp8.encode(np.array([value, -value], np.float32))
    assert fp8.values()[codes].tolist() == [nearest, -nearest]


def test_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    values = (10 * np.random.default_rng(0).standard_normal(10_000)).astype(np.float32)
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn)
    assert (fp8.encode(values) == theirs.view(torch.uint8).numpy()).all()
    assert (fp8.values()[fp8.encode(values)] == theirs.float().numpy()).all()


def test_blocks_carry_their_scales() -> None:
    values = np.random.default_rng(1).standard_normal((6, 256)).astype(np.float32)
    values[2, 128:] = 0
    values[3] *= 1e-4
    weight = encode_weight("w", values, "fp8")
    error = np.abs(weight.dequantize() - values).reshape(6, 2, 128)
    assert (error <= np.abs(values).reshape(6, 2, 128).max(axis=2, keepdims=True) / 16).all()
    assert (weight.dequantize()[2, 128:] == 0).all()


def scaled_tensors(values: np.ndarray, kind: str) -> dict[str, Weight]:
    """`values` as 8-bit floats and their scales, as the three kinds of checkpoints store them."""
    rows, columns = values.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-columns // 128) * 128), np.float32)
    padded[:rows, :columns] = np.abs(values)
    blocks = padded.reshape(len(padded) // 128, 128, -1, 128).max(axis=(1, 3)) / 448
    scale = {"tensor": np.abs(values).max() / 448, "row": np.abs(values).max(axis=1, keepdims=True) / 448}.get(kind)
    factor = np.repeat(np.repeat(blocks, 128, 0), 128, 1)[:rows, :columns] if scale is None else scale
    name = "w.weight_scale_inv" if scale is None else "w.weight_scale"
    scales = np.atleast_1d(np.asarray(blocks if scale is None else scale, np.float32))
    codes = Weight("w.weight", "f8_e4m3", values.shape, fp8.encode(values / factor).reshape(-1))
    return {"w.weight": codes, name: encode_weight(name, scales)}


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
@pytest.mark.parametrize("shape", [(200, 384), (64, 96)])
def test_scales_beside_a_weight_are_joined_to_it(kind: str, shape: tuple[int, int]) -> None:
    values = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    tensors = scaled_tensors(values, kind)
    joined = own_scales({**tensors, "w.input_scale": encode_weight("w.input_scale", np.ones(1, np.float32))})
    assert list(joined) == ["w.weight"]
    assert joined["w.weight"].format == ("fp8" if shape[1] % 128 == 0 else "bf16")
    assert np.abs(joined["w.weight"].dequantize() - values).max() < np.abs(values).max() / 20


def test_scales_that_do_not_fit_are_refused() -> None:
    tensors = scaled_tensors(np.ones((256, 256), np.float32), "row")
    with pytest.raises(ModelError, match=r"'w.weight': 8-bit floats need one scale beside them; there are none"):
        own_scales({"w.weight": tensors["w.weight"]})
    wrong = encode_weight("w.weight_scale", np.ones((3, 5), np.float32))
    with pytest.raises(ModelError, match=r"shape \(256, 256\): scales of shape \(3, 5\) are neither"):
        own_scales({"w.weight": tensors["w.weight"], "w.weight_scale": wrong})


def test_a_scalar_scale_has_no_shape(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"w.weight_scale": encode_weight("s", np.ones(1, np.float32))})
    raw = (tmp_path / "m.safetensors").read_bytes().replace(b'"shape": [1]', b'"shape": [] ')
    (tmp_path / "m.safetensors").write_bytes(raw)
    assert open_safetensors(tmp_path / "m.safetensors")["w.weight_scale"].shape == (1,)


# A model -------------------------------------------------------------------------------------------------------------
def answer(engine: Engine) -> list[int]:
    engine.add([5, 6, 7], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    tokens: list[int] = []
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, Text | Finished), event
            tokens += [token.id for token in getattr(event, "tokens", ())]
    return tokens


def test_a_quantized_directory_is_opened(tmp_path: Path) -> None:
    """As Hugging Face stores one: 8-bit projections in blocks, everything else as it was."""
    config = replace(SHAPES["tiny-wide"], rope_style="half")
    plain = random_checkpoint(config, format="bf16")
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    names |= {"ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    tensors: dict[str, Weight] = {}
    for name, weight in plain.weights.items():
        if name.startswith("blk."):
            _, index, part, _ = name.split(".")
            theirs = f"model.layers.{index}.{names[part]}"
            if len(weight.shape) == 2:
                tensors |= {
                    theirs + each.name.removeprefix("w"): each
                    for each in scaled_tensors(weight.dequantize(), "block").values()
                }
                continue
        else:
            theirs = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[name.split(".")[0]]
        tensors[theirs + ".weight"] = weight
    write_safetensors(tmp_path / "model.safetensors", tensors)
    fields = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads, "head_dim": config.head_dim,
        "num_key_value_heads": config.num_kv_heads, "intermediate_size": config.intermediate_size,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    opened = open_checkpoint(tmp_path)
    assert opened.weights["blk.0.ffn_up.weight"].format == "fp8"
    reference, native = (Engine(opened, EngineConfig(device=name, kv_tokens=64)) for name in ("reference", "cpu"))
    assert answer(reference) == answer(native)


@pytest.mark.parametrize("format", ["fp8", "q8_0"])
def test_a_model_is_quantized_when_it_is_loaded(format: str) -> None:
    checkpoint = random_checkpoint(SHAPES["tiny-wide"], format="bf16")
    named = {"fp8": "fp8", "q8_0": "int8"}[format]
    engine = Engine(checkpoint, EngineConfig(device="reference", kv_tokens=64, quantize=named))  # type: ignore[arg-type]
    assert engine.checkpoint.weights["blk.0.ffn_up.weight"].format == format
    assert engine.checkpoint.fingerprint != checkpoint.fingerprint
    same = Engine(quantize(checkpoint, format), EngineConfig(device="reference", kv_tokens=64))
    assert answer(engine) == answer(same)


def test_quantizing_keeps_what_is_near() -> None:
    weight = encode_weight("w", np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32), "bf16")
    eight = quantize_weight(weight, "fp8")
    assert np.abs(eight.dequantize() - weight.dequantize()).max() < 0.2

"""Damaged models, hundreds of them: each opens, or is refused by a ModelError. Nothing else may happen.

Three families of damage, all of them the same at every run: the file cut at every place where something begins or
ends; a field of the header overwritten by a value that tempts a reader; bytes flipped or replaced at random.
"""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unspool.errors import ModelError
from unspool.models.checkpoint import open_checkpoint
from unspool.models.random import SHAPES, random_checkpoint, write_random_gguf
from unspool.models.registry import build
from unspool.ops.reference import ReferenceOps
from unspool.weights.gguf import Reader
from unspool.weights.safetensors import write_safetensors

CONFIG = replace(SHAPES["tiny"], num_layers=1, vocab_size=257, hidden_size=32, num_heads=2, num_kv_heads=1,
                 intermediate_size=32)  # fmt: skip
TEMPTING = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def survive(path: Path) -> bool:
    """Opens the model, touches every byte, makes its tokenizer: True if it is still a model, False if refused."""
    try:
        checkpoint = open_checkpoint(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for weight in checkpoint.weights.values():
                assert weight.dequantize().shape == weight.shape
            build(checkpoint.config, checkpoint.weights, ReferenceOps())  # every tensor has its place
        assert len(checkpoint.fingerprint) == 64
        if path.suffix == ".gguf":
            checkpoint.tokenizer()
    except ModelError:
        return False
    return True


def try_all(variants: Iterator[bytes], write: Callable[[bytes], Path]) -> tuple[int, int]:
    """(how many variants there were, how many were refused)"""
    outcomes = [survive(write(data)) for data in variants]
    return len(outcomes), outcomes.count(False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "whole.gguf"
    write_random_gguf(path, CONFIG, format="q8_0")
    assert survive(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def boundaries(whole: bytes, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Where every value that the reader reads begins; found by watching it, less the vocabulary's many."""
    places: list[int] = []
    path = tmp_path_factory.mktemp("watched") / "m.gguf"
    path.write_bytes(whole)
    with pytest.MonkeyPatch.context() as patch:
        scalar = Reader.scalar

        def watched(self: Reader, kind: str) -> object:
            places.append(self.position)
            return scalar(self, kind)

        patch.setattr(Reader, "scalar", watched)
        open_checkpoint(path)
    assert len(places) > 120
    return places


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "m.gguf"
        path.unlink(missing_ok=True)  # a new file: the old one's pages may still be mapped
        path.write_bytes(data)
        return path

    return write


def test_gguf_cut_at_every_boundary(whole: bytes, boundaries: list[int], damaged: Callable[[bytes], Path]) -> None:
    cuts = {0, len(whole) - 1, *range(30), *boundaries, *(place + 1 for place in boundaries)}
    cuts |= set(range(0, len(whole), len(whole) // 100))
    total, refused = try_all((whole[:cut] for cut in sorted(cuts)), damaged)
    assert total > 350
    assert refused == total


def test_gguf_with_tempting_numbers(whole: bytes, boundaries: list[int], damaged: Callable[[bytes], Path]) -> None:
    def variants() -> Iterator[bytes]:
        for place in boundaries:
            for value in TEMPTING:
                yield whole[:place] + struct.pack("<Q", value) + whole[place + 8 :]
            for value in TEMPTING[:5]:
                yield whole[:place] + struct.pack("<I", value) + whole[place + 4 :]

    total, refused = try_all(variants(), damaged)
    assert total > 1800
    assert refused > total // 2


def test_gguf_with_flipped_bits(whole: bytes, boundaries: list[int], damaged: Callable[[bytes], Path]) -> None:
    random = np.random.default_rng(11)
    end = boundaries[-1] + 8

    def variants() -> Iterator[bytes]:
        for _ in range(400):
            data = bytearray(whole)
            for _ in range(int(random.integers(1, 4))):
                data[int(random.integers(end))] ^= 1 << int(random.integers(8))
            yield bytes(data)

    total, refused = try_all(variants(), damaged)
    assert (total, refused > 0) == (400, True)


def test_gguf_with_swapped_types_and_garbage(
    whole: bytes, boundaries: list[int], damaged: Callable[[bytes], Path]
) -> None:
    random = np.random.default_rng(12)

    def variants() -> Iterator[bytes]:
        for place in boundaries:  # where this was a type, it is now another; elsewhere it is a small number
            yield whole[:place] + struct.pack("<I", int(random.integers(14))) + whole[place + 4 :]
        for _ in range(60):  # a run of noise, a piece cut out, a piece put in twice
            start, length = int(random.integers(len(whole))), int(random.integers(1, 200))
            yield whole[:start] + random.bytes(length) + whole[start + length :]
            yield whole[:start] + whole[start + length :]
            yield whole[: start + length] + whole[start:]
        for length in (1, 24, 1000):
            yield random.bytes(length)
            yield whole[:24] + random.bytes(length)

    total, refused = try_all(variants(), damaged)
    assert total > 300
    assert refused > total // 3


def test_gguf_with_tensors_in_any_bytes(whole: bytes, damaged: Callable[[bytes], Path]) -> None:
    """Weights that are noise are still weights: NaN and infinite scales among them decode without a warning."""
    random = np.random.default_rng(13)
    data = whole[: len(whole) // 2] + random.bytes(len(whole) - len(whole) // 2)
    assert survive(damaged(data))
    assert survive(damaged(whole[: len(whole) // 2] + b"\xff" * (len(whole) - len(whole) // 2)))


# --- directories -------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj", "attn_": "self_attn.",
             "ffn_": "mlp."}  # fmt: skip
    tensors = {}
    for name, weight in random_checkpoint(replace(CONFIG, rope_style="half"), format="bf16").weights.items():
        for ours, theirs in names.items():
            if ours in name:
                name = name.replace(ours, theirs)
                break
        for kind in ("q", "k", "v", "gate", "up", "down"):
            name = name.replace(f".{kind}.weight", f".{kind}_proj.weight")
        tensors[name.replace("blk.", "model.layers.")] = weight
    write_safetensors(tmp_path / "model.safetensors", tensors)
    values = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 32,
              "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32,
              "vocab_size": 257, "max_position_embeddings": 512,
              "tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [1, 2]}')
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert survive(tmp_path)
    return tmp_path


def rewriter(path: Path, directory: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        return directory

    return write


def test_safetensors_damaged(directory: Path) -> None:
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    end = 8 + struct.unpack_from("<Q", whole)[0]
    random = np.random.default_rng(14)

    def variants() -> Iterator[bytes]:
        for cut in {*range(0, end, 16), *range(end - 3, end + 3), *range(end, len(whole), len(whole) // 40)}:
            yield whole[:cut]
        for value in TEMPTING:
            yield struct.pack("<Q", value) + whole[8:]
        for _ in range(400):
            data = bytearray(whole)
            data[int(random.integers(end))] ^= 1 << int(random.integers(8))
            yield bytes(data)
        for digits in (b"0", b"-1", b"99999999999999999999", b"1e99", b"null", b"[[[[", b'"x"', b"NaN", b"true"):
            yield _resized(whole, end, b"[32", b"[" + digits)
            yield _resized(whole, end, b'"data_offsets": [0', b'"data_offsets": [' + digits)
            yield _resized(whole, end, b'"BF16"', digits)

    total, refused = try_all(variants(), rewriter(path, directory))
    assert total > 550
    assert refused > 300


def _resized(whole: bytes, end: int, old: bytes, new: bytes) -> bytes:
    """The file with its header edited and the header's length made right, so that the edit itself is what is read."""
    header = whole[8:end].replace(old, new, 1)
    return struct.pack("<Q", len(header)) + header + whole[end:]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_damaged(directory: Path, name: str) -> None:
    path = directory / name
    values = json.loads(path.read_text())
    whole = path.read_bytes()
    random = np.random.default_rng(15)
    odd = ["0", "-1", "1e400", "NaN", "null", "true", '"\\ud800"', '"x"', "[]", "{}", "[1, [2]]", "9" * 400, "1.5"]

    def variants() -> Iterator[bytes]:
        for cut in range(0, len(whole), 3):
            yield whole[:cut]
        for key in [*values, "head_dim", "rope_theta", "rope_parameters", "sliding_window", "do_sample", "top_k"]:
            for value in odd:
                yield json.dumps(values | {key: "@"}).replace('"@"', value).encode()
        for _ in range(100):
            data = bytearray(whole)
            data[int(random.integers(len(data)))] = int(random.integers(256))
            yield bytes(data)

    total, refused = try_all(variants(), rewriter(path, directory))
    assert total > 180
    assert refused > 0

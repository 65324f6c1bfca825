"""The safetensors reader: the library's files are read back; what is wrong is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unspool.errors import ModelError
from unspool.weights.safetensors import INDEX, open_safetensors, open_safetensors_directory, write_safetensors
from unspool.weights.weight import encode_weight

VALUES = np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32)
ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def write(path: Path, header: Any, data: bytes = bytes(16)) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    save_file({"a": VALUES, "b": VALUES.astype(np.float16)}, tmp_path / "model.safetensors", {"format": "pt"})
    tensors = open_safetensors_directory(tmp_path)
    assert {name: weight.format for name, weight in tensors.items()} == {"a": "f32", "b": "f16"}
    np.testing.assert_array_equal(tensors["a"].dequantize(), VALUES)
    assert not tensors["a"].data.flags.owndata


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    weights = {"a": encode_weight("a", VALUES), "b": encode_weight("b", VALUES, "f16")}
    write_safetensors(tmp_path / "model.safetensors", weights)
    theirs = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(theirs["a"], VALUES)
    np.testing.assert_array_equal(theirs["b"], VALUES.astype(np.float16))
    with pytest.raises(ModelError, match="tensor 'c': safetensors files hold F32, F16, BF16, F8_E4M3, U8, not q8_0"):
        write_safetensors(tmp_path / "x", {"c": encode_weight("c", np.zeros((1, 32), np.float32), "q8_0")})


def test_bf16(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "only.safetensors", {"a": encode_weight("a", VALUES, "bf16")})
    np.testing.assert_allclose(open_safetensors_directory(tmp_path)["a"].dequantize(), VALUES, rtol=0.01)


def test_shards_are_joined_by_the_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m-1.safetensors", {"a": encode_weight("a", VALUES)})
    write_safetensors(tmp_path / "m-2.safetensors", {"b": encode_weight("b", -VALUES)})
    with pytest.raises(ModelError, match="holds 2 safetensors files and no"):
        open_safetensors_directory(tmp_path)
    index = tmp_path / INDEX

    def joined(files: Any) -> Any:
        index.write_text(json.dumps({"weight_map": files}))
        return open_safetensors_directory(tmp_path)

    assert set(joined({"a": "m-1.safetensors", "b": "m-2.safetensors"})) == {"a", "b"}
    for files, message in [
        ({"a": "m-1.safetensors", "c": "m-2.safetensors"}, "tensor 'b': .* says it is in None"),
        ({"a": "m-1.safetensors", "b": "m-1.safetensors"}, "m-1.safetensors: tensor 'b' is missing"),
        ({"a": "../m-1.safetensors"}, "no file beside the index"),
        ({"a": "/etc/passwd"}, "no file beside the index"),
        ({"a": "model.bin"}, "no file beside the index"),
        ({"a": "\ud800.safetensors"}, "no file beside the index"),
        ({"a": 3}, "no file beside the index"),
        ({"a": "m-3.safetensors"}, "m-3.safetensors cannot be read"),
        ([], "weight_map: an object"),
    ]:
        with pytest.raises(ModelError, match=message):
            joined(files)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"holds no model.safetensors; pytorch_model.bin may be a pickle"):
        open_safetensors_directory(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "header is not valid JSON"),
        (b"\xff\xff", "header is not valid JSON"),
        (b"[" * 100_000, "header is not valid JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "header is not valid JSON"),
        (b"[]", "header is not a JSON object"),
        (b'{"a": {}, "a": {}}', "the key 'a' comes twice"),
        ({"a": 3}, "tensor 'a': dtype, shape and data_offsets were expected"),
        ({"a": ENTRY | {"dtype": "I64"}}, "tensor 'a': type I64 cannot be read; F32, F16, BF16, F8_E4M3, U8 can"),
        ({"a": ENTRY | {"dtype": ["F32"]}}, "tensor 'a': type"),
        ({"a": ENTRY | {"shape": []}}, r"F32 of shape \[1\] takes 4 bytes; its offsets span 16"),
        ({"a": ENTRY | {"shape": [0, 2]}}, "is not 1 to 6 positive numbers"),
        ({"a": ENTRY | {"shape": [-2, -2]}}, "is not 1 to 6 positive numbers"),
        ({"a": ENTRY | {"shape": [2.0, 2]}}, "is not 1 to 6 positive numbers"),
        ({"a": ENTRY | {"shape": [True, 4]}}, "is not 1 to 6 positive numbers"),
        ({"a": ENTRY | {"shape": [1 << 61] * 4}}, "its offsets span 16"),
        ({"a": ENTRY | {"shape": [3]}}, r"F32 of shape \[3\] takes 12 bytes; its offsets span 16"),
        ({"a": ENTRY | {"data_offsets": [16, 32]}}, "its bytes end at 32, but the file's end at 16"),
        ({"a": ENTRY | {"data_offsets": [16, 0]}}, "its offsets span -16"),
        ({"a": ENTRY | {"data_offsets": [-16, 0]}}, "are not two positions"),
        ({"a": ENTRY | {"data_offsets": "ab"}}, "are not two positions"),
        ({"a": ENTRY, "b": ENTRY}, "inside another"),
        ({"\ud800": ENTRY}, "its name is not a string"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / "model.safetensors", header)
    with pytest.raises(ModelError, match=message) as caught:
        open_safetensors(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"1234", struct.pack("<Q", 1 << 63), struct.pack("<Q", 200) + b"{}"])
def test_a_short_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_safetensors_directory(tmp_path)

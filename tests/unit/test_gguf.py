"""The GGUF reader: what the writer and the `gguf` package write is read back; what is wrong is named."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from unspool.errors import ModelError
from unspool.weights import gguf as reader
from unspool.weights.gguf import open_gguf, write_gguf
from unspool.weights.weight import encode_weight

VALUES = np.random.default_rng(1).standard_normal((6, 256)).astype(np.float32)
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "true": True,
    "count": 7,
    "negative": -7,
    "huge": 1 << 40,
    "number": 1e-5,
    "text": "naïve ☃",
    "texts": ["", "a", "☃"],
    "numbers": [0.5, -2.0],
    "integers": [3, -1, 1],
    "booleans": [True, False],
    "none": [],
}


def header(version: int = 3, num_tensors: int = 0, num_keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    tensors = {name: encode_weight(name, VALUES, name) for name in reader.TENSOR_FORMATS.values()}
    write_gguf(tmp_path / "a.gguf", METADATA, tensors)
    file = open_gguf(tmp_path / "a.gguf")
    assert file.metadata == METADATA
    assert list(file.tensors) == list(tensors)
    for name, weight in file.tensors.items():
        assert (weight.format, weight.shape) == (name, (6, 256))
        assert weight.data.tobytes() == tensors[name].data.tobytes()
        assert not weight.data.flags.writeable
        assert not weight.data.flags.owndata  # the file's own pages


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", METADATA, {"w": encode_weight("w", VALUES, "q4_k")})
    theirs = gguf.GGUFReader(tmp_path / "a.gguf")
    assert theirs.fields["text"].contents() == "naïve ☃"
    assert theirs.fields["texts"].contents() == ["", "a", "☃"]
    assert theirs.tensors[0].tensor_type.name == "Q4_K"
    assert list(theirs.tensors[0].shape) == [256, 6]


def test_we_read_what_the_package_writes(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int16("i16", -300)
    writer.add_float64("f64", 0.1)
    writer.add_array("tokens", ["x", "ü"])
    writer.add_tensor("w", VALUES)
    writer.add_tensor("v", VALUES[0].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "a.gguf")
    expected = {"general.architecture": "llama", "u8": 200, "i16": -300, "f64": 0.1, "tokens": ["x", "ü"]}
    assert file.metadata == expected
    np.testing.assert_array_equal(file.tensors["w"].dequantize(), VALUES)
    np.testing.assert_array_equal(file.tensors["v"].dequantize(), VALUES[0].astype(np.float16).astype(np.float32))


def test_the_alignment_key_is_honoured(tmp_path: Path) -> None:
    tensors = {"a": encode_weight("a", VALUES[0, :3]), "b": encode_weight("b", VALUES)}
    write_gguf(tmp_path / "a.gguf", {"general.alignment": 128}, tensors)
    file = open_gguf(tmp_path / "a.gguf")
    np.testing.assert_array_equal(file.tensors["b"].dequantize(), VALUES)


def test_a_split_model_is_joined_from_any_of_its_files(tmp_path: Path) -> None:
    parts = [{"a": encode_weight("a", VALUES)}, {"b": encode_weight("b", -VALUES)}]
    for number, tensors in enumerate(parts):
        keys = {"split.no": number, "split.count": 2, "split.tensors.count": 2, "first": number == 0}
        write_gguf(tmp_path / f"m-{number + 1:05}-of-00002.gguf", keys, tensors)
    for number in (1, 2):
        file = open_gguf(tmp_path / f"m-{number:05}-of-00002.gguf")
        assert set(file.tensors) == {"a", "b"}
        assert file.metadata["first"] is True
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf cannot be read"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="one of 2 files of a split model"):
        open_gguf(tmp_path / "m.gguf")


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"before")
    with pytest.raises(ModelError, match="key 'bad': GGUF cannot hold a dict"):
        write_gguf(tmp_path / "a.gguf", {"bad": {}}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
    assert (tmp_path / "a.gguf").read_bytes() == b"before"


ARRAY_HEAD = struct.pack("<IQ", 8, 1 << 21)  # two million strings that are not there
NESTED = struct.pack("<IQ", 9, 1) * 40


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"GG", "ends at 2 bytes"),
        (b"PK\3\4" + bytes(60), "not a GGUF file"),
        (header(1), "version 1; versions 2 and 3"),
        (header(3 << 24), "big-endian"),
        (header(num_tensors=1 << 60), "tensors; at most 65536"),
        (header(num_keys=1 << 60), "keys; at most 65536"),
        (header(num_keys=1), "key 0 of 1: 8 bytes wanted at 24, but the file ends at 24"),
        (header(num_keys=1) + string("k" * 2000), "a name of 2000 bytes"),
        (header(num_keys=1) + struct.pack("<Q", 1 << 63) + b"k", "a name of"),
        (header(num_keys=1) + key(b"\xff\xfe", 4, b"abcd"), "key 0 of 1: a string is not UTF-8"),
        (header(num_keys=2) + key("k", 4, b"abcd") * 2, "key 'k': it occurs twice"),
        (header(num_keys=1) + key("k", 99, b"abcd"), "key 'k': unknown value type 99"),
        (header(num_keys=1) + key("k", 7, b"\2"), "key 'k': a boolean is 2"),
        (header(num_keys=1) + key("k", 9, struct.pack("<IQ", 7, 2) + b"\1\7"), "key 'k': a boolean is 7"),
        (header(num_keys=1) + key("k", 8, struct.pack("<Q", 1 << 62)), "key 'k': 4611686018427387904 bytes wanted"),
        (header(num_keys=1) + key("k", 9, ARRAY_HEAD), "key 'k': 16777216 bytes wanted"),
        (header(num_keys=1) + key("k", 9, struct.pack("<IQ", 4, 1 << 62)), "at most 4194304 are allowed"),
        (header(num_keys=1) + key("k", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 1 << 40)), "string 0 of 1 runs"),
        (header(num_keys=1) + key("k", 9, struct.pack("<IQ", 8, 2) + string("a" * 10)), "string 1 of 2 runs past"),
        (header(num_keys=1) + key("k", 9, struct.pack("<IQ", 8, 1) + string(b"\xff")), "string 0 is not UTF-8"),
        (header(num_keys=1) + key("k", 9, NESTED), "nested deeper than 2"),
        (header(num_keys=1) + key("general.alignment", 4, struct.pack("<I", 0)), "general.alignment: 0 is not a power"),
        (header(num_keys=1) + key("general.alignment", 8, string("x")), "general.alignment: 'x' is not a power"),
        (header(num_tensors=1) + tensor("t", (8,), kind=16) + bytes(96), "tensor 't': tensor type IQ2_XXS cannot"),
        (header(num_tensors=1) + tensor("t", (8,), kind=77) + bytes(96), "tensor 't': tensor type 77 cannot"),
        (header(num_tensors=1) + tensor("t", (8, 0)) + bytes(96), r"tensor 't': shape \(0, 8\) does not fit"),
        (header(num_tensors=1) + tensor("t", (48,), kind=2) + bytes(96), "32 values a block"),
        (header(num_tensors=1) + tensor("t", ()) + bytes(96), "tensor 't': 0 dimensions"),
        (header(num_tensors=1) + tensor("t", (1,) * 5) + bytes(96), "tensor 't': 5 dimensions"),
        (header(num_tensors=1) + tensor("t", (1 << 62,) * 4) + bytes(96), "tensor 't': its bytes end at"),
        (header(num_tensors=1) + tensor("t", (8,), offset=1 << 63) + bytes(96), "tensor 't': its bytes end at"),
        (header(num_tensors=1) + tensor("t", (8,), offset=4) + bytes(96), "not a multiple of the alignment 32"),
        (header(num_tensors=2) + tensor("t", (8,)) * 2 + bytes(96), "tensor 't': it occurs twice"),
        (header(num_tensors=2) + tensor("t", (16,)) + tensor("u", (8,), offset=32) + bytes(200), "inside another"),
        (header(num_tensors=1) + tensor("t", (8,))[:-3], "tensor 't': 8 bytes wanted"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    refused(tmp_path, data, message)


def test_many_empty_strings_are_no_bomb(tmp_path: Path) -> None:
    """A sparse file may claim gigabytes of empty strings; the bound on elements stops it before the first."""
    path = tmp_path / "bad.gguf"
    with open(path, "wb") as file:
        file.write(header(num_keys=1) + key("k", 9, struct.pack("<IQ", 8, 1 << 30)))
        file.truncate(16 << 30)
    with pytest.raises(ModelError, match="at most 4194304"):
        open_gguf(path)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        open_gguf(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelError):
        open_gguf(tmp_path)


def test_every_tensor_type_is_known_by_name() -> None:
    known = set(reader.TENSOR_FORMATS) | set(reader.OTHER_FORMATS)
    assert set(range(43)) == known
    for number, name in reader.TENSOR_FORMATS.items():
        assert gguf.GGMLQuantizationType(number).name.lower() == name
    for kind in gguf.GGMLQuantizationType:
        assert kind.name in (reader.OTHER_FORMATS.get(kind.value), reader.TENSOR_FORMATS.get(kind.value, "").upper())

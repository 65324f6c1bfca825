"""tokenizer.model, tekken.json and tiktoken.model without a tokenizer.json, against the ids of their own libraries.

scripts/fixture_tokenizers.py makes the files and the ids.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from unspool.errors import ModelError
from unspool.text import byte_level, character_pairs, ranked_bytes, sentencepiece, texts
from unspool.text.character_map import CharacterMap
from unspool.text.sentencepiece_file import read_sentencepiece
from unspool.text.token_types import UNUSED
from unspool.text.tokenizer import Tokenizer, from_directory, from_gguf

FIXTURES = Path(__file__).parent.parent / "fixtures" / "text" / "tokenizers"
EXPECTED: dict[str, dict[str, list[int]]] = json.loads((FIXTURES / "expected.json").read_text("utf-8"))
FILES = {"bpe": "tokenizer.model", "unigram": "tokenizer.model", "tekken": "tekken.json"}
Place = Callable[..., Path]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A directory with one of the fixtures under the name that directories have for it."""

    def copy(name: str, **settings: Any) -> Path:
        source = FIXTURES / (f"{name}.model" if name != "tekken" else "tekken.json")
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        shutil.copy(source, folder / FILES[name])
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return copy


def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (texts, byte_level, character_pairs, sentencepiece, ranked_bytes):
        monkeypatch.setattr(module, "as_texts", lambda _: None)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("is_native", [True, False])
def test_ids_are_those_of_the_files_own_library(
    name: str, is_native: bool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_native:
        pytest.importorskip("unspool._native")
    else:
        without_extension(monkeypatch)
    tokenizer = from_directory(place(name))
    for text, ids in EXPECTED[name].items():
        assert tokenizer.encode(text, add_special=False) == ids, text


def test_texts_come_back(place: Place) -> None:
    for name in ("bpe", "tekken"):
        tokenizer = from_directory(place(name))
        for text in EXPECTED[name]:
            expected = text.replace("▁", " ") if name == "bpe" else text
            assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_beginnings_and_ends_are_the_files_own(place: Place) -> None:
    for name in EXPECTED:
        tokenizer = from_directory(place(name))
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, {2}, True)
        assert tokenizer.named_tokens["eos_token"] == "</s>"
        assert tokenizer.encode("<s>a</s>", parse_special=True)[0] == 1
        assert tokenizer.encode("<s>a</s>", parse_special=True)[-1] == 2
        assert not tokenizer.special_ids & set(tokenizer.encode("<s>a</s>", add_special=False))
    assert not from_directory(place("bpe", add_bos_token=False)).adds_bos


def test_the_first_file_counts(place: Place) -> None:
    shutil.copy(place("tekken") / "tekken.json", place("bpe"))
    tokenizer = from_directory(place("bpe"))
    assert tokenizer.encode("[INST]", add_special=False) == EXPECTED["bpe"]["[INST]"]


# --- tokens of tokenizer_config.json ---------------------------------------------------------------------------------
def entry(content: str, **options: bool) -> dict[str, Any]:
    return {"content": content, "special": False, "lstrip": False, "rstrip": False} | options


def test_added_tokens_stand_behind_the_models_pieces(place: Place) -> None:
    size = from_directory(place("bpe")).vocab_size
    decoder = {str(size): entry("<|end|>", special=True, rstrip=True), str(size + 2): entry("<think>")}
    tokenizer = from_directory(place("bpe", added_tokens_decoder=decoder, eos_token="<|end|>"))
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.eos_ids == {2, size}
    hello = tokenizer.encode("hello", add_special=False)
    assert tokenizer.encode("hello<|end|>\n<think>", parse_special=True, add_special=False) == [*hello, size, size + 2]
    assert tokenizer.encode("<think>", add_special=False) == [size + 2], "no control token, so no text to guard"
    assert size not in tokenizer.encode("<|end|>", add_special=False)
    assert tokenizer.decode([size, size + 2]) == "<think>"
    assert tokenizer.decode([size + 1]) == ""


def test_what_added_tokens_ask_for_and_do_not_get_is_recorded(place: Place) -> None:
    size = from_directory(place("bpe")).vocab_size
    decoder = {str(size): entry("<mask>", lstrip=True)}
    assert from_directory(place("bpe", added_tokens_decoder=decoder)).notes == (
        "tokenizer_config.json: lstrip of <mask> is not done",
    )


def test_each_part_between_marks_gets_a_space_unless_legacy_is_false(place: Place) -> None:
    first = from_directory(place("bpe")).encode("the", add_special=False)
    again = from_directory(place("bpe")).encode("<s>the</s>the", parse_special=True, add_special=False)
    assert again == [1, *first, 2, *first]
    once = from_directory(place("bpe", legacy=False)).encode("the</s>the", parse_special=True, add_special=False)
    assert once[: len(first) + 1] == [*first, 2]
    assert once[len(first) + 1 :] != first


# --- the same vocabulary in a GGUF file ------------------------------------------------------------------------------
def as_gguf(name: str, model: str) -> Tokenizer:
    source = read_sentencepiece(FIXTURES / f"{name}.model")
    keys = {
        "model": model,
        "tokens": source.pieces,
        "scores": list(source.scores),
        "token_type": source.types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": source.adds_space,
        "remove_extra_whitespaces": source.removes_extra_spaces,
        "precompiled_charsmap": list(struct.unpack(f"{len(source.character_map)}b", source.character_map)),
    }
    return from_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def test_a_gguf_file_with_the_same_vocabulary_gives_the_same_ids(place: Place) -> None:
    for name, model in (("bpe", "llama"), ("unigram", "t5")):
        tokenizer, gguf = from_directory(place(name)), as_gguf(name, model)
        assert tokenizer.fingerprint == gguf.fingerprint
        for text in EXPECTED[name]:
            if "<tool>" not in text and "--" not in text:  # converters mark these, which are found in the text as it is
                assert gguf.encode(text) == ([1] if model == "llama" else []) + EXPECTED[name][text], text


def test_pieces_that_are_not_used_become_no_text(place: Place) -> None:
    source = read_sentencepiece(FIXTURES / "unigram.model")
    [index] = [index for index in EXPECTED["unigram"]["model"] if len(source.pieces[index]) > 4][:1]
    keys = {"model": "t5", "tokens": source.pieces, "scores": list(source.scores)}
    types = [UNUSED if place == index else kind for place, kind in enumerate(source.types)]
    tokenizer = from_gguf({f"tokenizer.ggml.{key}": value for key, value in (keys | {"token_type": types}).items()})
    assert index not in tokenizer.encode("model")


# --- characters ------------------------------------------------------------------------------------------------------
def test_the_longest_sequence_is_replaced() -> None:
    characters = CharacterMap(read_sentencepiece(FIXTURES / "unigram.model").character_map)
    assert characters.replace("oﬃce ﬁne ①½e\u0301x e\u0300") == "oﬃce fine 11/2éx e\u0300"
    assert characters.replace("plain text, e") == "plain text, e"
    assert characters.replace("a\tb\u00a0c") == "a b c"
    assert characters.replace("") == ""


def test_a_damaged_map_is_refused_or_ends() -> None:
    whole = read_sentencepiece(FIXTURES / "unigram.model").character_map
    rng = Random(2)
    for _ in range(100):
        blob = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
        for _ in range(rng.randrange(4)):
            if blob:
                blob[rng.randrange(len(blob))] = rng.randrange(256)
        try:
            CharacterMap(bytes(blob)).replace("ﬁne ①½e\u0301 text\n" * 3)
        except ValueError:
            continue


# --- faults ----------------------------------------------------------------------------------------------------------
def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def message(*fields: tuple[int, Any]) -> bytes:
    """Fields by their numbers: integers, floats, bytes."""
    written = b""
    for number, value in fields:
        if isinstance(value, int):
            written += varint(number << 3) + varint(value)
        elif isinstance(value, float):
            written += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            written += varint(number << 3 | 2) + varint(len(value)) + value
    return written


def piece(text: bytes, kind: int = 1, score: float = -1.0) -> tuple[int, bytes]:
    return 1, message((1, text), (2, score), (3, kind))


UNK = piece(b"<unk>", 2)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "its first byte is b''"),
        (b"IQ== 0\n", r"its first byte is b'I'"),
        (message(UNK)[:-1], "bytes are announced"),
        (b"\n\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "a number of more than 10 bytes"),
        (message(UNK) + b"\x0b", "unknown kind 3"),
        (message(UNK) + b"\x08\x01", "field 1 is not a message"),
        (message(piece(b"a")), "0 of the type UNKNOWN"),
        (message(UNK, piece(b"")), r"pieces\[1\] has 0 bytes"),
        (message(UNK, piece(b"a" * 5000)), r"pieces\[1\] has 5,000 bytes"),
        (message(UNK, piece(b"a"), piece(b"a")), "'a' stands at 1 and at 2"),
        (message(UNK, piece(b"\xff")), r"pieces\[1\] is not UTF-8"),
        (message(UNK, piece(b"a", 9)), r"pieces\[1\]\.type: unknown type 9"),
        (message(UNK, piece(b"a", score=float("nan"))), r"pieces\[1\]\.score is not a number"),
        (message(UNK, piece(b"a"), (2, message((3, 4)))), "model_type CHAR is not supported"),
        (message(UNK, piece(b"a"), (3, message((5, 0)))), "escape_whitespaces: false is not supported"),
        (message(UNK, piece(b"a"), (3, message((2, b"/////w")))), r"precompiled_charsmap: its trie has 791,621,423"),
        (message(UNK, piece(b"<0xZZ>", 6)), "marked as a byte and names none"),
        (message(UNK, piece(b"<0x41>", 6)), "1 bytes have a piece; all 256 or none"),
        (message(UNK, piece(b"a" * 300)), "token 1 has more than 256 bytes"),
    ],
)
def test_a_faulty_model_is_named(content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelError, match=problem) as caught:
        from_directory(tmp_path)
    assert "tokenizer.model" in str(caught.value) or "token 1" in str(caught.value)


def test_damaged_models_are_named_or_run(place: Place) -> None:
    rng = Random(4)
    for name in ("bpe", "unigram"):
        path = place(name)
        whole = (path / "tokenizer.model").read_bytes()
        for _ in range(80):
            damaged = bytearray(whole)
            for _ in range(rng.randrange(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            (path / "tokenizer.model").write_bytes(damaged)
            with suppress(ModelError):
                from_directory(path).encode("the ﬁrst ☃ -- token\n")


def changed(content: dict[str, Any], **config: Any) -> dict[str, Any]:
    return content | {"config": content["config"] | config}


def test_faulty_tekken_files_are_named(place: Place) -> None:
    path = place("tekken") / "tekken.json"
    whole = json.loads(path.read_text())
    vocab = whole["vocab"]
    for content, problem in (
        (changed(whole, pattern="(a+)+$"), "config.pattern: not one of the known patterns"),
        (changed(whole, default_vocab_size=10**9), "config.default_vocab_size is 1000000000"),
        (changed(whole, default_vocab_size=True), "config.default_vocab_size is True"),
        (changed(whole, default_num_special_tokens=-1), "config.default_num_special_tokens is -1"),
        (changed(whole, default_vocab_size=2000), "vocab: expected a list of at least"),
        (whole | {"config": []}, "config: expected an object"),
        (whole | {"vocab": [*vocab[1:], vocab[0]]}, r"vocab\[0\]: expected rank 0"),
        (whole | {"vocab": [vocab[0] | {"token_bytes": "?"}, *vocab[1:]]}, r"vocab\[0\]\.token_bytes: not base64"),
        (whole | {"vocab": [vocab[0] | {"token_bytes": ""}, *vocab[1:]]}, "a token of 0 bytes"),
        (whole | {"vocab": [*vocab[:300], vocab[299] | {"rank": 300}, *vocab[301:]]}, "the same bytes"),
        (whole | {"special_tokens": [{"rank": 3, "token_str": "a"}]}, r"special_tokens\[0\]: expected rank 0"),
        (whole | {"special_tokens": whole["special_tokens"] * 9}, "special_tokens: expected a list of at most 24"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ModelError, match=problem):
            from_directory(path.parent)


def test_control_tokens_that_a_tekken_file_does_not_list(place: Place) -> None:
    path = place("tekken") / "tekken.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in whole.items() if key != "special_tokens"}))
    tokenizer = from_directory(path.parent)
    assert tokenizer.encode("[TOOL_CALLS]", parse_special=True) == [1, 9]
    assert tokenizer.token_text(23) == "<SPECIAL_23>"


# --- tiktoken --------------------------------------------------------------------------------------------------------
def write_tiktoken(path: Path, tokens: list[bytes], **settings: Any) -> Path:
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (path / "tiktoken.model").write_bytes(b"".join(lines))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


KIMI = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
BYTES = [bytes([byte]) for byte in range(256)]


def test_kimis_ranks(tmp_path: Path) -> None:
    tokens = [*BYTES, b"he", b"ll", b"hell", b" w", b"or", b" wor"]
    decoder = {str(len(tokens)): entry("[BOS]", special=True), str(len(tokens) + 1): entry("[EOS]", special=True)}
    tokenizer = from_directory(
        write_tiktoken(tmp_path, tokens, **KIMI, added_tokens_decoder=decoder, bos_token="[BOS]", eos_token="[EOS]")
    )
    assert [tokenizer.token_text(index) for index in tokenizer.encode("hello world")] == ["hell", "o", " wor", "l", "d"]
    assert tokenizer.encode("[BOS]a[EOS]", parse_special=True) == [len(tokens), 97, len(tokens) + 1]
    assert tokenizer.eos_ids == {len(tokens) + 1}
    assert tokenizer.vocab_size == len(tokens) + 256
    assert tokenizer.token_text(len(tokens) + 2) == f"<|reserved_token_{len(tokens) + 2}|>"


def test_faulty_tiktoken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tiktoken\.model: a tiktoken file has no pattern"):
        from_directory(write_tiktoken(tmp_path, BYTES))
    with pytest.raises(ModelError, match="1 of 256 bytes have no token"):
        from_directory(write_tiktoken(tmp_path, BYTES[1:], **KIMI))
    write_tiktoken(tmp_path, BYTES, **KIMI)
    with (tmp_path / "tiktoken.model").open("ab") as file:
        file.write(b"YWI= 300\n")
    with pytest.raises(ModelError, match="line 257: expected a token and the rank 256"):
        from_directory(tmp_path)


def test_a_directory_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none of tokenizer\.json, tokenizer\.model, tekken\.json"):
        from_directory(tmp_path)


# --- Gemma 4 ---------------------------------------------------------------------------------------------------------
def characters(**changes: Any) -> dict[str, Any]:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|turn>", "<tool|>"]
    tokens += ["▁", "a", "b", "\n", "▁a", "a▁", "▁▁", "\n\n", "a▁b"]
    metadata = {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": [3, 3, 3, 3] + [6] * 256 + [3, 4] + [1] * 9,
        "merges": ["▁ ▁", "a ▁", "▁ a", "\n \n", "a▁ b"],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items()}


@pytest.mark.parametrize("is_native", [True, False])
def test_merges_may_cross_spaces(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_native:
        pytest.importorskip("unspool._native")
    else:
        without_extension(monkeypatch)
    tokenizer = from_gguf(characters())
    spelled = [tokenizer.token_text(index) for index in tokenizer.encode("a b  a☃\n\n\n<tool|>", add_special=False)]
    assert spelled[:4] == ["a b", "  ", "a", "\ufffd"]
    assert spelled[-3:] == ["\n\n", "\n", "<tool|>"]
    assert tokenizer.encode("a") == [2, tokenizer.encode("a", add_special=False)[0]]
    assert tokenizer.decode(tokenizer.encode("a b  a☃\n\n\n<tool|>")) == "a b  a☃\n\n\n<tool|>"


def test_gemma4_always_begins_with_its_mark() -> None:
    tokenizer = from_gguf(characters(add_bos_token=False))
    assert tokenizer.adds_bos
    assert "add_bos_token is false" in tokenizer.notes[0]


def test_faults_of_a_vocabulary_of_characters_are_named() -> None:
    with pytest.raises(ModelError, match=r"token_type: 0 of 256 bytes have a token"):
        from_gguf(characters(token_type=[1] * 271))
    with pytest.raises(ModelError, match=r"merges\[0\]: 'a x' needs the token 'x'"):
        from_gguf(characters(merges=["a x"]))
    with pytest.raises(ModelError, match=r"merges: missing"):
        from_gguf({key: value for key, value in characters().items() if "merges" not in key})


def test_other_kinds_are_refused_by_name() -> None:
    for model, why in (("rwkv", "RWKV's own"), ("plamo2", "PLaMo 2's own"), ("bert", "the word pieces of encoders")):
        with pytest.raises(ModelError, match=f"'{model}' is not supported: {why}; supported: gpt2, llama, gemma4, t5"):
            from_gguf(characters(model=model))

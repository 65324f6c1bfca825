"""Tokenizers from a Hugging Face directory, written here by the library that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from unspool.errors import ModelError
from unspool.text.tokenizer import from_directory, from_gguf
from unspool.text.vocabulary import byte_characters

VOCABULARY = [*byte_characters(), "he", "Ġhe"]
MERGES = [("h", "e"), ("Ġ", "he")]


def byte_level() -> Library:
    library = Library(models.BPE({token: i for i, token in enumerate(VOCABULARY)}, MERGES))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|im_end|>", special=True)])
    library.add_tokens([AddedToken("<tool>", special=False)])
    return library


def sentencepiece() -> Library:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a"]
    library = Library(
        models.BPE({t: i for i, t in enumerate(tokens)}, [("▁", "a")], byte_fallback=True, unk_token="<unk>")
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(library: Library, **config: Any) -> Path:
        library.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def test_byte_level(save: Save) -> None:
    tokenizer = from_directory(save(byte_level(), bos_token="<s>", eos_token={"content": "<|im_end|>"}), None)
    assert tokenizer.vocab_size == len(VOCABULARY) + 3
    assert tokenizer.decode(tokenizer.encode("hehe he ☃é\n")) == "hehe he ☃é\n"
    assert tokenizer.token_bytes(len(VOCABULARY) - 1) == b" he"
    assert not tokenizer.adds_bos
    assert tokenizer.eos_ids == {len(VOCABULARY) + 1}
    assert tokenizer.special_ids == {len(VOCABULARY), len(VOCABULARY) + 1}


def test_marks_are_parsed_only_when_asked(save: Save) -> None:
    tokenizer = from_directory(save(byte_level(), eos_token="<|im_end|>"), None)
    for _ in range(2):  # the library's switch is turned back and forth
        assert tokenizer.encode("<|im_end|>", parse_special=True) == [len(VOCABULARY) + 1]
        plain = tokenizer.encode("<|im_end|><tool>")
        assert tokenizer.special_ids.isdisjoint(plain)
        assert tokenizer.decode(plain) == "<|im_end|><tool>"


def test_sentencepiece(save: Save) -> None:
    path = save(sentencepiece(), bos_token="<s>", eos_token="</s>")
    tokenizer, library = from_directory(path, None), Library.from_file(str(path / "tokenizer.json"))
    assert tokenizer.adds_bos
    assert tokenizer.strips_leading_space
    for text in ("a", " a", "a a é\n", ""):
        ids = tokenizer.encode(text)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<s>a", parse_special=True).count(1) == 1


def test_tokenizer_config_decides_about_bos(save: Save) -> None:
    assert not from_directory(save(sentencepiece(), bos_token="<s>", add_bos_token=False), None).adds_bos
    assert from_directory(save(byte_level(), bos_token="<s>", add_bos_token=True), None).adds_bos


def test_end_tokens_from_everywhere(save: Save) -> None:
    path = save(byte_level(), eos_token="<s>")
    tokenizer = from_directory(path, {"eos_token_id": [3, 4]}, extra_eos=[5])
    assert tokenizer.eos_ids == {3, 4, 5, len(VOCABULARY), len(VOCABULARY) + 1}


def test_the_same_vocabulary_has_the_same_fingerprint_in_both_kinds_of_file(save: Save) -> None:
    tokens = [*VOCABULARY, "<s>", "<|im_end|>", "<tool>"]
    gguf = from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(VOCABULARY) + [3, 3, 4],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        }
    )
    directory = from_directory(save(byte_level()), None)
    assert directory.fingerprint == gguf.fingerprint
    assert directory.encode("hehe <tool> he", parse_special=True) == gguf.encode("hehe <tool> he", parse_special=True)


def test_faults_are_named(save: Save, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        from_directory(tmp_path, None)
    with pytest.raises(ModelError, match="eos_token is '<no>'"):
        from_directory(save(byte_level(), eos_token="<no>"), None)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: not JSON"):
        from_directory(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        from_directory(tmp_path, None)


def test_a_spelling_we_do_not_know_is_refused(save: Save) -> None:
    library = byte_level()
    library.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="decoder: WordPiece is not supported"):
        from_directory(save(library), None)


def test_tokens_are_named_as_chat_templates_know_them(save: Save) -> None:
    path = save(
        byte_level(),
        bos_token="<s>",
        eos_token={"content": "<|im_end|>", "lstrip": False},
        pad_token=None,
        unk_token=5,
        image_token="<image>",
        additional_special_tokens=["<a>", {"content": "<b>"}, 3],
        extra_special_tokens={"audio_token": "<audio>"},
        add_bos_token=False,
    )
    (path / "special_tokens_map.json").write_text(json.dumps({"sep_token": "<sep>"}))
    assert from_directory(path, None).named_tokens == {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "sep_token": "<sep>",
        "image_token": "<image>",
        "audio_token": "<audio>",
        "additional_special_tokens": ["<a>", "<b>"],
    }

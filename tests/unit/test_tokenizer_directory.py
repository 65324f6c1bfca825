"""Tokenizers from a Hugging Face directory, written here by the library that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from unspool.errors import ModelError
from unspool.text import library_file
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
    with pytest.raises(ModelError, match=r"none of tokenizer\.json, .*brings no tokenizer"):
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


# What a hostile file may do -----------------------------------------------------------------------------------------
def changed(path: Path, **parts: Any) -> Path:
    file = path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return path


def test_gemmas_runs_of_spaces_are_spaces(save: Save) -> None:
    library = sentencepiece()
    library.add_tokens([AddedToken("▁▁", special=False, normalized=False), AddedToken("<b>", special=False)])
    path = save(library)
    tokenizer = from_directory(path, None)
    runs, mark = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    assert tokenizer.token_bytes(runs) == b"  "
    assert tokenizer.token_bytes(mark) == b"<b>"
    assert tokenizer.decode([260, runs, 260]) == Library.from_file(str(path / "tokenizer.json")).decode(
        [260, runs, 260]
    )


def test_a_broken_character_map_is_refused(save: Save) -> None:
    """The library aborts the whole process on it."""
    path = changed(save(byte_level()), normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="})
    with pytest.raises(ModelError, match=r"tokenizer\.json: loading it was stopped: it crashed"):
        from_directory(path, None)


def test_an_expression_that_backtracks_without_end_is_a_model_error(save: Save) -> None:
    """The library panics, and a panic is no Exception."""
    cut = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = from_directory(changed(save(byte_level()), pre_tokenizer=cut), None)
    with pytest.raises(ModelError, match=r"tokenizer\.json: the text cannot be encoded: PanicException: "):
        tokenizer.encode("a" * 40 + "!")
    assert tokenizer.encode("he") == [256], "the next text has nothing to do with it"


def test_a_text_that_takes_too_long_is_stopped(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = {"type": "Split", "pattern": {"Regex": "(a?){19}(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = from_directory(changed(save(byte_level()), pre_tokenizer=cut), None)
    monkeypatch.setattr(library_file, "ENCODE_SECONDS", 0.5)
    with pytest.raises(ModelError, match=r"tokenizer\.json: encoding a text was stopped: it took more than 0"):
        tokenizer.encode(("a" * 17 + "!") * 1000)
    assert tokenizer.encode("he") == [256]


def test_normalizers_that_multiply_the_text_are_stopped(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    path = changed(save(byte_level()), normalizer={"type": "Sequence", "normalizers": [replace] * 12})
    monkeypatch.setattr(library_file, "MEMORY", 128 << 20)
    tokenizer = from_directory(path, None)
    with pytest.raises(
        ModelError, match=r"encoding a text was stopped: it crashed, or took more than 128 MiB of memory"
    ):
        tokenizer.encode("a")
    assert tokenizer.encode("he") == [256]


def test_nesting_without_end_is_refused(save: Save, tmp_path: Path) -> None:
    save(byte_level())
    deep = "[" * 100_000 + "]" * 100_000
    (tmp_path / "tokenizer_config.json").write_text(f'{{"a": {deep}}}')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: not JSON"):
        from_directory(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    for part in ("normalizer", "decoder", "model"):
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {part: "DEEP"}).replace('"DEEP"', deep))
        with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
            from_directory(tmp_path, None)
    nested: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    for _ in range(100):
        nested = {"type": "Sequence", "decoders": [nested]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"decoder": nested}))
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        from_directory(tmp_path, None)


def test_damaged_files_are_named(save: Save, tmp_path: Path) -> None:
    """Bytes changed at random: a tokenizer, or a ModelError."""
    whole = (save(sentencepiece()) / "tokenizer.json").read_bytes()
    random = Random(5)
    outcomes = []
    for _ in range(12):
        data = bytearray(whole)
        data[random.randrange(len(data))] = random.choice(b"0123456789{[]},:aeT\x00\xff")
        (tmp_path / "tokenizer.json").write_bytes(data)
        try:
            from_directory(tmp_path, None).encode("a b\n")
        except ModelError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("")
    assert "" in outcomes
    assert any(outcomes)
    assert all("tokenizer.json: " in outcome for outcome in outcomes if outcome)


def test_a_file_that_changes_while_it_is_open_is_noticed(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(byte_level())
    tokenizer = from_directory(path, None)
    tokenizer._encoder._process.close()  # as after a stop
    assert tokenizer.encode("he") == [256]
    tokenizer._encoder._process.close()
    other = byte_level()
    other.add_tokens(["new"])
    save(other)
    with pytest.raises(ModelError, match="it was changed since it was opened"):
        tokenizer.encode("he")

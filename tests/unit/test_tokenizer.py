"""Tokenizers from GGUF metadata, on vocabularies small enough to check by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.errors import ModelError, RequestError
from unspool.text.pretokenizers import PRE_TOKENIZERS
from unspool.text.tokenizer import Tokenizer, from_gguf
from unspool.text.vocabulary import byte_characters

WORDS = ["he", "ll", "hell", "hello", "Ġw", "Ġwo", "12", "é"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "Ã ©"]
MARKS = ["<s>", "<|im_end|>", "<tool>"]


def byte_level(**changes: Any) -> dict[str, Any]:
    tokens = [*byte_characters(), *WORDS[:-1], "Ã©", *MARKS]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "merges": MERGES,
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("<|im_end|>"),
    }
    metadata.update(changes)
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "c", "▁a", "ab", "bc", "aa"]
SPM_SCORES = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -1.5, -3.0]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    metadata = {
        "model": "llama",
        "tokens": SPM_TOKENS,
        "scores": SPM_SCORES,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    metadata.update(changes)
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def spell(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, **options)]


def test_merges_join_best_first_and_never_across_words() -> None:
    tokenizer = from_gguf(byte_level())
    assert spell(tokenizer, "hello world") == ["hello", " wo", "r", "l", "d"]
    assert spell(tokenizer, "shell") == ["s", "hell"]
    assert tokenizer.decode(tokenizer.encode("hello wörld ☃")) == "hello wörld ☃"


def test_each_pre_tokenizer_cuts_in_its_own_way() -> None:
    whole, single = from_gguf(byte_level(pre="gpt-2")), from_gguf(byte_level(pre="smollm"))
    assert spell(whole, "112") == ["1", "12"]
    assert spell(single, "112") == ["1", "1", "2"]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_no_pre_tokenizer_loses_text(name: str) -> None:
    tokenizer = from_gguf(byte_level(pre=name, add_bos_token=False))
    text = "Hello wörld's 1234567  \n\n 3 中文，カナ 한국 नमस्ते e\u0301 ½\u00a0\u2028 <|im_end|> camelCase!\t\r\n\x00🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text())
def test_every_text_survives_the_round_trip(text: str) -> None:
    for tokenizer in (_BYTE_LEVEL, _SENTENCEPIECE):
        expected = text.replace("▁", " ") if tokenizer is _SENTENCEPIECE else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected


_BYTE_LEVEL = from_gguf(byte_level())
_SENTENCEPIECE = from_gguf(sentencepiece())


def test_marks_are_parsed_only_when_asked() -> None:
    tokenizer = from_gguf(byte_level())
    end = tokenizer.encode("<|im_end|>", parse_special=True)
    assert end == [tokenizer.vocab_size - 2]
    assert set(end) <= tokenizer.eos_ids
    plain = tokenizer.encode("<|im_end|>")
    assert tokenizer.special_ids.isdisjoint(plain)
    assert tokenizer.decode(plain) == "<|im_end|>"
    assert tokenizer.decode(end) == ""
    assert tokenizer.decode(end, skip_special=False) == "<|im_end|>"
    # an added word is a word of the vocabulary, whoever writes it
    assert tokenizer.encode("x<tool>")[-1] == tokenizer.vocab_size - 1
    assert tokenizer.decode(tokenizer.encode("x<tool>")) == "x<tool>"


def test_bos_comes_exactly_once() -> None:
    tokenizer = from_gguf(byte_level(add_bos_token=True))
    bos = tokenizer.bos_id
    assert tokenizer.adds_bos
    assert tokenizer.encode("") == [bos]
    assert tokenizer.encode("a") == tokenizer.encode("<s>a", parse_special=True)
    assert tokenizer.encode("<s><s>a", parse_special=True).count(bos or 0) == 1
    assert bos not in tokenizer.encode("a", add_special=False)
    assert tokenizer.encode("<s>a").count(bos or 0) == 1, "a written <s> is text, the model's own comes first"
    assert len(tokenizer.encode("<s>a")) == 5
    assert not from_gguf(byte_level()).adds_bos


def test_llama3_adds_bos_where_the_file_is_silent_and_takes_known_words_whole() -> None:
    tokenizer = from_gguf(byte_level(pre="llama-bpe", merges=[]))
    assert tokenizer.adds_bos
    assert spell(tokenizer, "hello", add_special=False) == ["hello"]
    assert spell(from_gguf(byte_level(merges=[])), "hello") == ["h", "e", "l", "l", "o"]


def test_end_tokens_are_found_by_name_too() -> None:
    tokens = [*byte_characters(), "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "</s>"]
    tokenizer = from_gguf(
        byte_level(tokens=tokens, token_type=[1] * 256 + [3, 1, 4, 1], merges=[], eos_token_id=256, bos_token_id=None)
    )
    assert tokenizer.eos_ids == {256, 257, 258}, "</s> is a word of HTML unless the file marks it"
    assert tokenizer.special_ids == {256, 257, 258}


def test_harmony_messages_do_not_end_the_answer() -> None:
    tokens = [*byte_characters(), "<|end|>", "<|return|>", "<|call|>"]
    tokenizer = from_gguf(
        byte_level(tokens=tokens, token_type=[1] * 256 + [3] * 3, merges=[], eos_token_id=257, bos_token_id=None)
    )
    assert tokenizer.eos_ids == {257, 258}


def test_a_missing_pre_is_recorded() -> None:
    assert "tokenizer.ggml.pre" in from_gguf(byte_level(pre=None)).notes[0]
    assert from_gguf(byte_level()).notes == ()


def test_tokens_are_named_as_chat_templates_know_them() -> None:
    ids = {"eos": 65, "unknown": 66, "padding": 2**32 - 1, "mask": -1}
    tokenizer = from_gguf(byte_level() | {f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items()})
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "A", "unk_token": "B"}


def test_bytes_and_texts_of_tokens() -> None:
    tokenizer = from_gguf(byte_level())
    assert tokenizer.token_bytes(tokenizer.encode("\n")[0]) == b"\n"
    assert tokenizer.token_bytes(0xFF) == b"\xff"
    assert tokenizer.token_text(0xFF) == "\ufffd"
    assert tokenizer.token_bytes(tokenizer.vocab_size - 2) == b"<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b"", "a padded embedding table has more rows than names"


def test_fingerprint_tells_vocabularies_apart() -> None:
    first = from_gguf(byte_level()).fingerprint
    assert first == from_gguf(byte_level(add_bos_token=True)).fingerprint
    assert first != from_gguf(byte_level(merges=MERGES[:-1])).fingerprint
    assert (
        from_gguf(sentencepiece()).fingerprint != from_gguf(sentencepiece(scores=[0.0] * len(SPM_TOKENS))).fingerprint
    )


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def test_best_score_first_then_leftmost() -> None:
    tokenizer = from_gguf(sentencepiece(add_space_prefix=False))
    assert spell(tokenizer, "abc", add_special=False) == ["a", "bc"], "bc scores above ab"
    assert spell(tokenizer, "aaa", add_special=False) == ["aa", "a"], "equal scores: the left pair first"
    tied = from_gguf(sentencepiece(add_space_prefix=False, scores=[0.0] * len(SPM_TOKENS)))
    assert spell(tied, "abc", add_special=False) == ["ab", "c"]


def test_a_space_goes_in_front_and_comes_off_again() -> None:
    tokenizer = from_gguf(sentencepiece())
    assert tokenizer.adds_bos
    assert [SPM_TOKENS[i] for i in tokenizer.encode("a")] == ["<s>", "▁a"]
    assert tokenizer.decode(tokenizer.encode("a")) == "a"
    assert tokenizer.decode(tokenizer.encode("  a b")) == "  a b"
    assert [SPM_TOKENS[i] for i in tokenizer.encode("a</s>a", parse_special=True)] == ["<s>", "▁a", "</s>", "▁a"]


def test_characters_without_a_token_become_bytes() -> None:
    tokenizer = from_gguf(sentencepiece(add_space_prefix=False))
    assert [SPM_TOKENS[i] for i in tokenizer.encode("é\n", add_special=False)] == ["<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(tokenizer.encode("é\n")) == "é\n"


def test_the_text_of_a_control_or_byte_token_stays_text() -> None:
    tokens = [*SPM_TOKENS, "<", "s", ">", "<s", "0", "x", "A", "<0", "<0x", "<0x0", "<0x0A"]
    tokenizer = from_gguf(
        sentencepiece(tokens=tokens, scores=SPM_SCORES + [-1.0] * 11, token_type=[2, 3, 3] + [6] * 256 + [1] * 19)
    )
    assert [tokens[i] for i in tokenizer.encode("<s>", add_special=False)] == ["▁", "<s", ">"]
    assert tokenizer.decode(tokenizer.encode("<0x0A>")) == "<0x0A>"


def test_words_are_merged_alone_only_where_no_token_crosses() -> None:
    tokens = [*SPM_TOKENS, ">", ">▁", ">▁a"]
    tokenizer = from_gguf(
        sentencepiece(
            tokens=tokens, scores=[*SPM_SCORES, -9.0, -0.5, -0.1], token_type=[2, 3, 3] + [6] * 256 + [1] * 11
        )
    )
    assert [tokens[i] for i in tokenizer.encode("b> a a", add_special=False)] == ["▁", "b", ">▁a", "▁a"]


# --- faults, each named by its key -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"tokenizer\.ggml\.model: missing"),
        (byte_level(model="plamo2"), r"tokenizer\.ggml\.model: 'plamo2' is not supported"),
        (byte_level(model="bert"), "'bert'"),
        (byte_level(model=3), r"tokenizer\.ggml\.model: expected str"),
        (byte_level(pre="never-heard-of"), r"tokenizer\.ggml\.pre: unknown pre-tokenizer 'never-heard-of'"),
        (byte_level(pre=7), r"tokenizer\.ggml\.pre: expected str"),
        (byte_level(tokens=None), r"tokenizer\.ggml\.tokens: missing"),
        (byte_level(tokens="abc"), r"tokenizer\.ggml\.tokens: expected an array"),
        (byte_level(tokens=[*byte_characters(), 5]), r"tokens\[256\]: expected str, got int"),
        (byte_level(tokens=[*byte_characters(), "a"]), "'a' stands at 97 and at 256|'a' stands at 256 and at"),
        (byte_level(token_type=[1, 1]), r"tokenizer\.ggml\.token_type: has 2 entries; the vocabulary has 267"),
        (byte_level(token_type=[1] * 266 + [9]), r"token_type\[266\]: unknown type 9"),
        (byte_level(token_type=[1] * 266 + ["x"]), r"token_type\[266\]: expected int, got str"),
        (byte_level(merges=None), r"tokenizer\.ggml\.merges: missing"),
        (byte_level(merges=["h e", "q zz"]), r"merges\[1\]: 'q zz' needs the token 'zz'"),
        (byte_level(merges=["h z"]), r"merges\[0\]: 'h z' needs the token 'hz'"),
        (byte_level(merges=["hello"]), r"merges\[0\]: 'hello' is not two tokens"),
        (byte_level(merges=["h e", None]), r"merges\[1\]: expected str"),
        (byte_level(bos_token_id=99_999), r"bos_token_id: id 99,999 is outside the vocabulary of 267"),
        (byte_level(eos_token_id=-1), r"eos_token_id: id -1 is outside"),
        (byte_level(eos_token_id="2"), r"eos_token_id: expected int, got str"),
        (byte_level(eos_token_id=True), r"eos_token_id: expected int, got bool"),
        (byte_level(add_bos_token=True, bos_token_id=None), "add_bos_token is true but"),
        (byte_level(add_bos_token=1), r"add_bos_token: expected bool"),
        (sentencepiece(scores=None), r"tokenizer\.ggml\.scores: missing"),
        (sentencepiece(scores=[0.0]), r"tokenizer\.ggml\.scores: has 1 entries"),
        (sentencepiece(token_type=[2, 3, 6] + [6] * 256 + [1] * 8), r"tokens\[2\]: '</s>' is marked as a byte"),
    ],
)
def test_a_fault_is_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_gguf(metadata)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match=r"U\+D83D") as caught:
        from_gguf(byte_level()).encode("ab\ud83d")
    assert caught.value.param == "prompt"


def test_text_that_the_vocabulary_cannot_spell_is_refused_not_dropped() -> None:
    tokens = [c for c in byte_characters() if c != "z"]
    tokenizer = from_gguf(
        byte_level(tokens=tokens, token_type=[1] * 255, merges=[], bos_token_id=None, eos_token_id=None)
    )
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    with pytest.raises(RequestError, match="0x7A"):
        tokenizer.encode("puzzle")


def test_marks_leftmost_first_then_longest() -> None:
    words = ["<a>", "<a><b>", "@@", "!"]
    tokens = [*(c for c in byte_characters() if c != "!"), *words]
    tokenizer = from_gguf(
        byte_level(tokens=tokens, token_type=[1] * 255 + [4] * 4, merges=[], bos_token_id=None, eos_token_id=None)
    )
    assert spell(tokenizer, "x<a><b>@@@<a>!<") == ["x", "<a><b>", "@@", "@", "<a>", "!", "<"]

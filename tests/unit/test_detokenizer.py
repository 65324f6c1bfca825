"""Streaming decoding against decoding the whole at once."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from unspool.text.detokenizer import Detokenizer
from unspool.text.tokenizer import from_gguf
from unspool.text.vocabulary import byte_characters

MARK, TOOL = 256, 257
BYTE_LEVEL = from_gguf(
    {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*byte_characters(), "<|im_end|>", "<tööl>", "ðŁĻĤ"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 4, 1],
        "tokenizer.ggml.merges": [],
    }
)
SENTENCEPIECE = from_gguf(
    {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*(f"<0x{b:02X}>" for b in range(256)), "<s>", "<tööl>", "▁a", "▁", "b", "▁▁", "é"],
        "tokenizer.ggml.token_type": [6] * 256 + [3, 4, 1, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0] * 263,
        "tokenizer.ggml.bos_token_id": MARK,
        "tokenizer.ggml.unknown_token_id": 0,
    }
)

byte_ids = st.integers(0, 258)
# Bytes that begin, continue and break characters, more often than chance would bring them together.
utf8ish = st.sampled_from(
    [0x41, 0x80, 0xBF, 0xC2, 0xC3, 0xE2, 0x98, 0x83, 0xED, 0xA0, 0xF0, 0x9F, 0x99, 0x82, 0xF4, 0xFF]
)
id_lists = st.lists(st.one_of(byte_ids, utf8ish), max_size=40)


@given(id_lists, st.booleans())
@example([0xF0, 0x9F, MARK, 0x99, 0x82], True)
@example([0xED, 0xA0, 0x80], True)
@example([0xF0, 0x9F, 0x41], True)
def test_pushes_join_to_the_whole(ids: list[int], skip_special: bool) -> None:
    kept = [i for i in ids if not (skip_special and i == MARK)]
    whole = b"".join(BYTE_LEVEL.token_bytes(i) for i in kept).decode("utf-8", "replace")
    detokenizer = Detokenizer(BYTE_LEVEL, skip_special=skip_special)
    pushed = [detokenizer.push(i) for i in ids]
    assert "".join(pushed) + detokenizer.flush() == whole
    assert BYTE_LEVEL.decode(ids, skip_special=skip_special) == whole


@given(st.text(max_size=30))
def test_no_half_characters(text: str) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    shown = ""
    for byte in text.encode():
        shown += detokenizer.push(byte)
        assert text.startswith(shown)
    assert shown == text, "a whole character is never held back"
    assert detokenizer.flush() == ""


@given(st.text(max_size=20), st.data())
def test_bytes_in_any_grouping_give_the_same_text(text: str, data: st.DataObject) -> None:
    """One token of several bytes or several of one: the same characters come out."""
    ids = BYTE_LEVEL.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = Detokenizer(BYTE_LEVEL)
    first = "".join(detokenizer.push(i) for i in ids[:cut])
    rest = "".join(detokenizer.push(i) for i in ids[cut:])
    assert first + rest + detokenizer.flush() == text


@given(st.lists(st.integers(0, 262), max_size=20), st.booleans())
def test_sentencepiece_takes_one_space_from_the_front(ids: list[int], skip_special: bool) -> None:
    whole = b"".join(SENTENCEPIECE.token_bytes(i) for i in ids if not (skip_special and i == MARK))
    words = next((n for n, i in enumerate(ids) if i != MARK), len(ids))
    front = b"" if skip_special else b"<s>" * words
    expected = front + whole.removeprefix(front).removeprefix(b" ")
    assert SENTENCEPIECE.decode(ids, skip_special=skip_special) == expected.decode("utf-8", "replace")


def test_an_answer_continues_its_prompt() -> None:
    """The space in front belongs to a text's beginning; an answer's first word keeps the space before it."""
    a = SENTENCEPIECE.encode("a", add_special=False)
    assert Detokenizer(SENTENCEPIECE).push(a[0]) == "a"
    assert Detokenizer(SENTENCEPIECE, prompt_ids=[MARK]).push(a[0]) == "a"
    assert Detokenizer(SENTENCEPIECE, prompt_ids=[MARK, *a]).push(a[0]) == " a"


@given(st.lists(st.integers(0, 262), max_size=12), st.lists(st.integers(256, 262), max_size=12))
def test_prompt_and_answer_join(answer: list[int], prompt: list[int]) -> None:
    detokenizer = Detokenizer(SENTENCEPIECE, prompt_ids=prompt)
    text = "".join([detokenizer.push(i) for i in answer]) + detokenizer.flush()
    assert SENTENCEPIECE.decode(prompt) + text == SENTENCEPIECE.decode([*prompt, *answer])


def test_literal_and_skipped_marks() -> None:
    hi = BYTE_LEVEL.encode("hi")
    assert BYTE_LEVEL.decode([*hi, MARK]) == "hi"
    assert BYTE_LEVEL.decode([*hi, MARK], skip_special=False) == "hi<|im_end|>"
    assert BYTE_LEVEL.decode([*hi, TOOL]) == "hi<tööl>", "an added word is text"
    assert BYTE_LEVEL.decode([258]) == "🙂"


def test_an_unfinished_character_shows_at_the_end() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert detokenizer.push(0xE2) == ""
    assert detokenizer.push(0x98) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""

"""The native vocabulary against what it stands for: Python's strings, the library's merges, the SentencePiece class."""

from __future__ import annotations

import random
import string
import struct
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unspool.errors import RequestError
from unspool.text.byte_level import LibraryWords, NativeWords, library_cuts
from unspool.text.character_pairs import LibraryCharacters, make_character_pairs
from unspool.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer, cut_ascii
from unspool.text.spm import SentencePieceModel, make_pieces
from unspool.text.texts import TextIds, Texts, as_texts, read_texts
from unspool.text.unigram import make_unigram
from unspool.text.vocabulary import byte_characters

pytest.importorskip("unspool._native")
RULES = sorted({rule.patterns: name for name, rule in PRE_TOKENIZERS.items()}.values())
# Words, numbers, contractions, cases, line ends and control characters, in every neighbourhood.
PARTS = [
    "  ",
    "    ",
    "\r\n",
    "\x1c",
    "\x1f",
    "\x00",
    "\x7f",
    "'s",
    "'S",
    "'ll",
    "'VE",
    "12",
    "1234567",
    "camelCase",
    "HTTPServer",
    "the",
    "--",
    "[[",
    "]]",
    "&&",
    "||",
    "~~",
    "//",
    "!?",
    "IMGIMGABZ",
    "<sentinel:3>",
]
ASCII = st.lists(st.sampled_from(PARTS) | st.sampled_from(string.printable), max_size=12).map("".join)


def texts(*given: str) -> Texts:
    found = as_texts(given)
    assert found is not None
    return found


# --- strings ---------------------------------------------------------------------------------------------------------
@given(st.lists(st.text(), max_size=40))
def test_strings_are_read_and_found(given: list[str]) -> None:
    found = texts(*given)
    assert list(found) == given
    assert [found[i] for i in range(-len(given), len(given))] == given + given
    assert found[1:3] == given[1:3]
    ids = TextIds(found)
    assert {text: ids[text] for text in given if text} == {text: given.index(text) for text in given if text}
    assert "" not in ids
    assert ids.get("no such text") == (given.index("no such text") if "no such text" in given else None)
    again = [i for i, text in enumerate(given) if text and given.index(text) != i]
    assert found.native.twice == (again[0] if again else -1)
    with pytest.raises(IndexError):
        found[len(given)]


@given(st.binary(max_size=12))
@example(b"\xed\xa0\x80")
@example(b"\xc0\x80")
@example(b"\xf4\x90\x80\x80")
@example(b"abcdefgh\xff")
def test_only_utf8_is_read(raw: bytes) -> None:
    try:
        expected = [raw.decode("utf-8")]
    except UnicodeDecodeError:
        expected = None
    found = read_texts(struct.pack("<Q", len(raw)) + raw, 0, 1)
    assert (found and list(found[0])) == expected


@pytest.mark.parametrize(
    ("buffer", "position", "count"),
    [
        (struct.pack("<Q", 4) + b"abc", 0, 1),
        (struct.pack("<Q", 2**64 - 1) + b"abc", 0, 1),
        (struct.pack("<Q", 3) + b"abc" + b"\0" * 7, 0, 2),
        (struct.pack("<Q", 3) + b"abc", 0, 2**61),
        (struct.pack("<Q", 3) + b"abc", 12, 1),
    ],
)
def test_what_runs_past_the_end_is_not_read(buffer: bytes, position: int, count: int) -> None:
    assert read_texts(buffer, position, count) is None


# --- cutting ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RULES)
@settings(max_examples=150)
@given(text=ASCII)
def test_ascii_is_cut_as_the_library_cuts_it(name: str, text: str) -> None:
    from tokenizers import pre_tokenizers

    rule = PRE_TOKENIZERS[name]
    words = cut_ascii(rule, text)
    if words is not None:
        cuts = pre_tokenizers.Sequence(library_cuts(rule))
        assert words == [word for word, _ in cuts.pre_tokenize_str(text)]


def test_the_common_rules_need_no_library_for_ascii() -> None:
    for name in ("gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "tekken", "deepseek-v3", "seed-coder"):
        assert cut_ascii(PRE_TOKENIZERS[name], "Hello world") == ["Hello", " world"]


# --- merging ---------------------------------------------------------------------------------------------------------
def random_pairs(rng: random.Random, count: int) -> tuple[list[str], list[str]]:
    """A byte-level vocabulary whose merges join any two tokens, so that many ways lead to one text."""
    tokens, merges = list(byte_characters()), []
    letters = [character for character in tokens if character in "abcdĠ'1Ã©"]
    while len(merges) < count:
        left, right = rng.choice(letters), rng.choice(letters)
        if len(left + right) < 9 and f"{left} {right}" not in merges:
            merges.append(f"{left} {right}")
            if left + right not in tokens:
                tokens.append(left + right)
                letters.append(left + right)
    return tokens, merges


@pytest.mark.parametrize("seed", range(12))
def test_pairs_merge_as_in_the_library(seed: int) -> None:
    rng = random.Random(seed)
    tokens, merges = random_pairs(rng, 60)
    rule = PreTokenizer(PRE_TOKENIZERS["gpt-2"].patterns, ignore_merges=seed % 2 == 1)
    ids = {token: index for index, token in enumerate(tokens)}
    ours, theirs = NativeWords(texts(*tokens).native, ids, merges, rule), LibraryWords(ids, merges, rule)
    assert ours.missing == theirs.missing == frozenset()
    for length in (1, 2, 5, 20, 200, 1000):
        for alphabet in ("abcd", "abcd '1é", "abcd '1é☃\n\x00\u00a0"):
            text = "".join(rng.choices(alphabet, k=length))
            assert ours.encode(text) == theirs.encode(text), text


def test_the_last_of_equal_merges_counts_as_in_the_library() -> None:
    tokens = [*byte_characters(), "ab", "bc"]
    ids = {token: index for index, token in enumerate(tokens)}
    merges = ["a b", "b c", "a b"]
    rule = PRE_TOKENIZERS["gpt-2"]
    assert NativeWords(texts(*tokens).native, ids, merges, rule).encode("abc") == LibraryWords(
        ids, merges, rule
    ).encode("abc")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("has_bytes", [True, False])
def test_pieces_merge_as_specified(seed: int, has_bytes: bool) -> None:
    rng = random.Random(seed)
    letters = "ab▁é☃"
    words = {"".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(80)}
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(words)]
    scores = [rng.choice([-1.0, -2.0, -3.5, 0.25]) for _ in tokens]
    byte_ids = list(range(2, 258)) if has_bytes else None
    marks: list[Any] = [*range(258), *rng.sample(range(258, len(tokens)), 5)]
    native = texts(*tokens)
    ours = make_pieces(native, TextIds(native), scores, marks, byte_ids, 0)
    ids = {token: index for index, token in enumerate(tokens) if index not in marks}
    theirs = SentencePieceModel(ids, scores, byte_ids, 0)
    for length in (0, 1, 2, 5, 20, 200, 1000):
        text = "".join(rng.choices(letters + "x\n", k=length))
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("has_bytes", [True, False])
def test_the_best_sum_of_scores_is_found_as_specified(seed: int, has_bytes: bool) -> None:
    """Scores are few, so that many ways of cutting a text are worth the same."""
    rng = random.Random(seed)
    letters = "ab▁é☃"
    words = {"".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(80)} - {"☃"}
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(words)]
    scores = [rng.choice([-1.3, -2.1, -3.7, -4.9]) for _ in tokens]
    byte_ids = list(range(1, 257)) if has_bytes else None
    marks = [*range(257), *rng.sample(range(257, len(tokens)), 5)]
    added = [index for index in rng.sample(range(257, len(tokens)), 3) if index not in marks]
    native = texts(*tokens)
    ids = {token: index for index, token in enumerate(tokens)}
    ours = make_unigram(native, TextIds(native), scores, marks, added, byte_ids, 0)
    theirs = make_unigram(tokens, ids, scores, marks, added, byte_ids, 0)
    for length in (0, 1, 2, 5, 20, 200, 1000):
        text = "".join(rng.choices(letters + "x\n", k=length))
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize("seed", range(12))
def test_pairs_of_characters_merge_as_in_the_library(seed: int) -> None:
    rng = random.Random(seed)
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"ab▁é\n"]
    merges: list[str] = []
    while len(merges) < 60:
        left, right = rng.choice(tokens[257:]), rng.choice(tokens[257:])
        if len(left + right) < 9 and f"{left} {right}" not in merges:
            merges.append(f"{left} {right}")
            if left + right not in tokens:
                tokens.append(left + right)
    ids = {token: index for index, token in enumerate(tokens)}
    ours = make_character_pairs(texts(*tokens), ids, merges, list(range(1, 257)), 0)
    theirs = LibraryCharacters(ids, merges, "<unk>")
    for length in (0, 1, 2, 5, 20, 200, 1000):
        text = "".join(rng.choices("ab▁é\n☃x", k=length))
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize("length", [40, 5000])
def test_a_panic_of_the_library_is_the_requests_error(length: int) -> None:
    """An expression that backtracks takes the place of ten million spaces, which take the library a second."""
    tokens = list(byte_characters())
    ids = {token: index for index, token in enumerate(tokens)}
    words = LibraryWords(ids, [], PreTokenizer(("(a+)+$",)))
    native = NativeWords(as_texts(tokens).native, ids, [], PreTokenizer(("(a+)+$",)))
    for each in (words, native):
        with pytest.raises(RequestError, match=r"the text cannot be cut into words: .*retry-limit") as caught:
            each.encode("é" + "a" * length + "!")
        assert caught.value.param == "prompt"

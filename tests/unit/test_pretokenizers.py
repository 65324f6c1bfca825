"""Numbers cut from the right: our patterns against the models' own, and in time that grows with the text."""

from __future__ import annotations

import random

import pytest
from tokenizers import Regex, pre_tokenizers

from unspool.text.byte_level import library_cuts
from unspool.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer

# The first rules of these families as their authors wrote them.
ORIGINALS = {
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "afmoe": (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)",),
}


def cut(patterns: tuple[str, ...], text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", ORIGINALS)
def test_numbers_are_cut_as_the_models_own_patterns_cut_them(name: str) -> None:
    original = ORIGINALS[name]
    ours = PRE_TOKENIZERS[name].patterns[: len(original)]
    rng = random.Random(name)
    for _ in range(3000):
        text = "".join(rng.choice("1234567890" * 3 + "½ⅧA _.\n٣x") for _ in range(rng.randrange(1, 30)))
        assert cut(ours, text) == cut(original, text), text


@pytest.mark.parametrize("name", ORIGINALS)
@pytest.mark.parametrize("after", [" ", "x", "½"])
def test_a_number_without_end_is_cut_soon(name: str, after: str) -> None:
    """The original patterns would take minutes."""
    rule: PreTokenizer = PRE_TOKENIZERS[name]
    words = pre_tokenizers.Sequence(library_cuts(rule)).pre_tokenize_str("a" + "7" * 200_000 + after)
    assert sum(len(word) for word, _ in words) == 200_002

"""The tokenizers library, for texts of any length."""

from __future__ import annotations

import random

import pytest

from unspool.text import library
from unspool.text.byte_level import library_cuts
from unspool.text.pretokenizers import pre_tokenizer

WORDS = ["it's", "Ж", " é", "語語", "  ", "\n", "\r\n", "12345", "a", "!?", "🙂", "\t", " the", "\u0301", "İ"]


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "falcon", "smollm"])
def test_long_texts_are_cut_as_short_ones_are(name: str) -> None:
    """Which of the library's calls is taken depends on the length alone, and makes no difference."""
    from tokenizers import pre_tokenizers

    splitter = pre_tokenizers.Sequence(library_cuts(pre_tokenizer(name)))
    rng = random.Random(name)
    for _ in range(5):
        text = "".join(rng.choices(WORDS, k=library.LONG))
        assert len(text) >= library.LONG
        assert library.cut(splitter, text) == [word for word, _ in splitter.pre_tokenize_str(text)]

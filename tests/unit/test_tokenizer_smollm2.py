"""The default model's vocabulary: ids recorded from llama.cpp on its very file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unspool.text.tokenizer import Tokenizer, from_gguf
from unspool.weights.gguf import open_gguf

CASES = json.loads((Path(__file__).parents[1] / "fixtures" / "text" / "smollm2_ids.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return from_gguf(open_gguf(smollm2_path).metadata)


def test_ids_are_llama_cpps(tokenizer: Tokenizer) -> None:
    for case in CASES:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        with_marks = tokenizer.encode(case["text"], parse_special=True)
        assert with_marks == case.get("special", case["ids"]), case["text"]


def test_texts_survive(tokenizer: Tokenizer) -> None:
    for case in CASES:
        assert tokenizer.decode(case["ids"]) == case["text"]


def test_its_marks(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49_152
    assert {tokenizer.token_text(i) for i in tokenizer.eos_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert not tokenizer.adds_bos
    assert len(tokenizer.special_ids) == 17
    assert tokenizer.notes == ()

"""Vocabularies as constraints see them: SentencePiece with byte fallback, pieces that double bytes, leading spaces."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from unspool.bench.walk import Dice
from unspool.sampling.constraint import Matcher, compile_constraint
from unspool.text.tokenizer import Tokenizer, from_gguf

_PIECES = ["▁", "日", "本", "中", "国", "日本", "the", "▁the", "name", "▁name", '{"', '":', "a", "▁a", "▁▁", "▁{"]
_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]


def sentencepiece(**changes: Any) -> Tokenizer:
    metadata = {
        "model": "llama",
        "tokens": _TOKENS,
        "scores": [0.0] * 259 + [-float(number) for number in range(len(_PIECES))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(_PIECES),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


@pytest.fixture(params=[True, False], ids=["space in front", "no space in front"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return sentencepiece(add_space_prefix=request.param)


def made(kind: str, value: Any, tokenizer: Tokenizer) -> Matcher:
    return compile_constraint(SimpleNamespace(kind=kind, value=value), tokenizer)


def as_written(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens that a model writes for this text inside an answer."""
    ids = tokenizer.encode(f"\n{text}", add_special=False)
    return ids[ids.index(tokenizer.encode("\n", add_special=False)[-1]) + 1 :]


@pytest.mark.parametrize(
    "choices", [["日本", "中国"], ["the name", "a name"], ["  a", " the"], ["日本 日本", "é", "日"]]
)
def test_every_choice_can_be_chosen(tokenizer: Tokenizer, choices: list[str]) -> None:
    root, dice = made("choice", choices, tokenizer), Dice(tokenizer)
    for choice in choices:
        assert dice.spells(root.fork(), choice.encode()), choice
        matcher = root.fork()
        for token in as_written(tokenizer, choice):
            matcher.accept(token)
        assert matcher.is_accepting, choice


@pytest.mark.parametrize("text", ["日本", "the name", " the", "é 日"])
def test_a_single_choice_is_forced(tokenizer: Tokenizer, text: str) -> None:
    matcher = made("choice", [text], tokenizer)
    data = b""
    while not matcher.is_finished:
        for token in matcher.forced():
            data += tokenizer.token_bytes(token)
            matcher.accept(token)
        assert text.encode().startswith(data)
        assert data
    assert data == text.encode()


def test_the_space_of_a_word_is_the_piece_and_not_the_byte(tokenizer: Tokenizer) -> None:
    matcher = made("regex", " ?a", tokenizer)
    assert matcher.check(_TOKENS.index("▁"))
    assert not matcher.check(_TOKENS.index("<0x20>"))
    assert matcher.check(_TOKENS.index("▁a"))


def test_documents_are_spelled_with_pieces(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["日本", "the a"]}}, "required": ["name"]}
    root, dice = made("json_schema", schema, tokenizer), Dice(tokenizer)
    for value in ("日本", "the a"):
        text = json.dumps({"name": value}, ensure_ascii=False, separators=(",", ":"))
        assert dice.spells(root.fork(), text.encode()), text

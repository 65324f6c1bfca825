"""The space that a SentencePiece vocabulary puts in front of a text: part of what continues a prompt, not of a chat's
answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from unspool.llm import LLM
from unspool.params import BeamParams, Constraint, SamplingParams
from unspool.text.tokenizer import from_gguf

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "time", "▁b"]
A, TIME = TOKENS.index("▁a"), TOKENS.index("time")


@pytest.fixture(scope="module")
def llm(tiny: Callable[..., Any]) -> Iterator[LLM]:
    tokenizer = from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 4,
            "tokenizer.ggml.scores": [0.0] * len(TOKENS),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    checkpoint = replace(tiny(), tokenizer=lambda: tokenizer, chat_template=template)
    with LLM(checkpoint, device="reference", kv_tokens=512) as llm:
        yield llm


def only(token: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=2, allowed_token_ids=[token], ignore_eos=True, **more)


@pytest.mark.parametrize("more", [{}, {"stop": "never"}, {"bad_words": "never"}, {"beam": BeamParams(1)}])
def test_an_answer_continues_its_prompt(llm: LLM, more: dict[str, Any]) -> None:
    result = llm.generate("a", only(A, **more))
    assert result.text == " a a"
    whole = llm.tokenizer.decode([*result.prompt_ids, *result.token_ids])
    assert whole == llm.tokenizer.decode(result.prompt_ids) + result.text
    assert "".join(event.text for event in llm.stream("a", only(A)) if hasattr(event, "text")) == " a a"


def test_what_only_marks_precede_is_the_beginning_of_a_text(llm: LLM) -> None:
    assert llm.generate([1], only(A)).text == "a a"
    assert llm.generate("", only(A)).text == "a a"


def test_a_chats_answer_is_a_text_of_its_own(llm: LLM) -> None:
    result = llm.chat([{"role": "user", "content": "a"}], only(A))
    assert result.text == "a a"
    assert llm.fork(result, 1, params=only(TIME)).text == "atime"
    assert llm.fork(llm.generate("a", only(A)), 1, params=only(TIME)).text == " atime"


def test_a_stop_at_the_start_is_found_with_its_space(llm: LLM) -> None:
    assert llm.generate("a", only(A, stop=" a")).finish_reason == "stop"
    assert llm.generate("a", only(A, stop=" a", beam=BeamParams(1))).text == ""


def test_a_constraint_is_met_to_the_character(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, constraint=Constraint("choice", [" a a"]), temperature=0)
    assert llm.chat([{"role": "user", "content": "b"}], params).text == " a a"

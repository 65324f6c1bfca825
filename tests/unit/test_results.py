"""What results say of themselves: short, as JSON, in a notebook, pickled; schemas, batches of chats and progress."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from unspool.async_llm import AsyncLLM
from unspool.chat.answers import ToolCall
from unspool.errors import ParseError, RequestError
from unspool.llm import LLM
from unspool.models.checkpoint import Checkpoint
from unspool.params import Constraint
from unspool.progress import tracked

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}>"
HELLO = [{"role": "user", "content": "hi"}]
BYE = [{"role": "user", "content": "bye"}]


@dataclass
class Answer:
    is_good: bool
    grade: int | None


@pytest.fixture(scope="module")
def checkpoint(tiny: Callable[..., Checkpoint]) -> Checkpoint:
    return replace(tiny(), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(checkpoint, device="cpu", threads=1, kv_tokens=4096) as llm:
        yield llm


def test_a_long_answer_prints_in_a_line_or_three(llm: LLM) -> None:
    result = llm.generate("hi", max_tokens=200, ignore_eos=True, seed=1, logprobs=2)
    assert len(repr(result)) < 1000
    assert "200 tokens" in repr(result)


def test_a_result_is_json_ready_and_survives_pickle(llm: LLM) -> None:
    result = llm.chat(HELLO, max_tokens=5, seed=1, n=2, logprobs=1)
    reported = json.loads(json.dumps(result.as_dict()))
    assert reported["text"] == result.text
    assert [each["token_ids"] for each in reported["choices"]] == [each.token_ids for each in result.choices]
    assert reported["usage"]["total_tokens"] == result.usage.total_tokens
    assert reported["logprobs"] == result.logprobs
    again = pickle.loads(pickle.dumps(result))
    assert again.as_dict() == result.as_dict()
    with pytest.raises(RequestError, match="left its model"):
        _ = again.token_texts


def test_tokens_have_texts(llm: LLM) -> None:
    result = llm.generate("hi", max_tokens=6, seed=2, ignore_eos=True)
    assert len(result.token_texts) == 6
    assert llm.decode(llm.encode("hello there")) == "hello there"
    with pytest.raises(RequestError, match="an integer"):
        llm.decode(["a"])  # type: ignore[list-item]


def test_a_notebook_shows_text_and_never_markup(llm: LLM) -> None:
    bound = Constraint("choice", ["<script>alert('&\"')</script>"])
    plain = llm.generate("hi", max_tokens=60, constraint=bound)
    reported = llm.generate("hi", max_tokens=60, constraint=bound, logprobs=3, trace=True)
    for result in (plain, reported):
        html = result._repr_html_()
        assert "<script" not in html
        assert "constraint" in html or "eos" in html
    assert reported._repr_html_().count("<span ") == len(reported.tokens)
    assert "entropy" in reported._repr_html_()


def test_a_schema_gives_a_value(llm: LLM) -> None:
    result = llm.chat(HELLO, schema=Answer, max_tokens=100, seed=1)
    assert isinstance(result.parsed, Answer)
    assert llm.generate("x", schema={"enum": [3]}, max_tokens=20).parsed == 3
    with llm.stream(HELLO, schema=Answer, max_tokens=100, seed=1) as stream:
        assert stream.result().parsed == result.parsed
    cut = llm.chat(HELLO, schema=Answer, max_tokens=2, seed=1)
    with pytest.raises(ParseError, match="no whole Answer"):
        _ = cut.parsed
    with pytest.raises(RequestError, match="there is no schema"):
        _ = llm.chat(HELLO, max_tokens=1).parsed


def test_a_schema_and_a_constraint_are_refused_together(llm: LLM) -> None:
    with pytest.raises(RequestError, match="twice"):
        llm.chat(HELLO, schema=Answer, constraint=Constraint("regex", "a"))


def test_many_conversations_are_one_batch_with_the_same_answers(llm: LLM, checkpoint: Checkpoint) -> None:
    alone = [llm.chat(each, max_tokens=6, seed=3).token_ids for each in (HELLO, BYE)]
    together = llm.chat([HELLO, BYE], max_tokens=6, seed=3)
    assert [each.token_ids for each in together] == alone
    each = llm.chat([HELLO, BYE], [{"max_tokens": 1}, {"max_tokens": 2}], ignore_eos=True)
    assert [len(result.tokens) for result in each] == [1, 2]
    with pytest.raises(RequestError, match="2 prompts and 1 params"):
        llm.chat([HELLO, BYE], [{"max_tokens": 1}])
    with pytest.raises(RequestError, match=r"messages\[0\].content"):
        llm.chat([HELLO, [{"role": "user"}]])

    async def ask() -> list[list[int]]:
        async with AsyncLLM(checkpoint, device="cpu", threads=1, kv_tokens=4096) as other:
            return [result.token_ids for result in await other.chat([HELLO, BYE], max_tokens=6, seed=3)]

    assert asyncio.run(ask()) == alone


def test_arguments_of_a_call_are_values() -> None:
    assert ToolCall("1", "f", '{"a": 1}').values == {"a": 1}
    for wrong in ('{"a": ', "[1]", ""):
        with pytest.raises(ParseError):
            _ = ToolCall("1", "f", wrong).values


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "total", "wanted", "is_shown"),
    [
        (Terminal, 3, None, True),
        (Terminal, 1, None, False),
        (Terminal, 3, False, False),
        (io.StringIO, 3, None, False),
        (io.StringIO, 3, True, True),
    ],
)
def test_progress_is_shown_where_it_is_seen(stream: Any, total: int, wanted: bool | None, is_shown: bool) -> None:
    out = stream()
    assert list(tracked(range(total), total, wanted, stream=out, clock=lambda: 1.0)) == list(range(total))
    assert bool(out.getvalue()) == is_shown
    if is_shown:
        assert f"{total} of {total} answers" in out.getvalue()

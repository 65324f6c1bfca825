"""LLM.chat and LLM.stream with tools: typed calls, the same from a stream as from the whole."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from unspool.errors import RequestError
from unspool.events import Finished, Text
from unspool.llm import LLM
from unspool.params import Constraint, SamplingParams

TEMPLATE = (
    "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}>"
)
HELLO = [{"role": "user", "content": "hi"}]
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sky", "sea"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
GO: dict[str, Any] = {"type": "function", "function": {"name": "go"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm(tiny: Any) -> Any:
    with LLM(replace(tiny(), chat_template=TEMPLATE), device="cpu", threads=1, kv_tokens=4096) as llm:
        yield llm


def forced(text: str, **more: Any) -> SamplingParams:
    return SamplingParams(constraint=Constraint("choice", [text]), max_tokens=300, **more)


def test_calls_are_typed_and_the_rest_is_content(llm: LLM) -> None:
    result = llm.chat(HELLO, forced("So.\n" + CALL), tools=[LOOK])
    assert result.text == "So.\n" + CALL
    assert result.content == "So."
    (call,) = result.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": "sky"})
    assert call.id.startswith("call_")
    assert result.warnings == ()


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_is_called_without_arguments(llm: LLM, parameters: Any) -> None:
    go = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    result = llm.chat(HELLO, max_tokens=60, seed=3, tools=[go], tool_choice="required", parallel_tool_calls=False)
    (call,) = result.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("go", {})


def test_without_tools_all_is_content(llm: LLM) -> None:
    result = llm.chat(HELLO, forced(CALL))
    assert (result.text, result.content, result.tool_calls) == (CALL, CALL, ())
    assert llm.chat(HELLO, forced(CALL), tools=[LOOK], tool_choice="none").tool_calls == ()


def test_a_stream_holds_what_came_so_far_and_ends_as_the_whole(llm: LLM) -> None:
    params = forced("So.\n" + CALL + "\n" + CALL, n=2)
    whole = llm.chat(HELLO, params, tools=[LOOK])
    with llm.stream(HELLO, params, tools=[LOOK]) as stream:
        grown = []
        for _ in stream:
            grown.append([call.arguments for call in stream.messages[0].calls])
        result = stream.result()
    assert grown[-1] == ['{"at": "sky"}'] * 2
    for one, other in zip(whole.choices, result.choices, strict=True):
        assert one.text == other.text
        assert one.content == other.content
        calls = [[(call.name, call.arguments) for call in each.tool_calls] for each in (one, other)]
        assert calls[0] == calls[1] == [("look", '{"at": "sky"}')] * 2


def test_required_calls_fit_their_schema(llm: LLM) -> None:
    for seed in range(3):
        params = SamplingParams(max_tokens=100, seed=seed, temperature=1.5)
        result = llm.chat(HELLO, params, tools=[GO, LOOK], tool_choice="required", parallel_tool_calls=False)
        assert len(result.tool_calls) == 1
        named = {"type": "function", "function": {"name": "look"}}
        result = llm.chat(HELLO, params, tools=[GO, LOOK], tool_choice=named)  # one function: one call
        assert (len(result.tool_calls), result.content) == (1, "")
        assert json.loads(result.tool_calls[0].arguments)["at"] in ("sky", "sea")


def test_one_call_ends_the_answer_where_one_is_wanted(llm: LLM) -> None:
    params = forced(CALL + "\n" + CALL + " and so on" * 20, n=2)
    results = [llm.chat(HELLO, params, tools=[LOOK], parallel_tool_calls=False) for _ in range(2)]
    for result in results:
        assert [len(choice.tool_calls) for choice in result.choices] == [1, 1]
        assert "and so on" not in result.text
        assert result.usage.completion_tokens == sum(len(choice.tokens) for choice in result.choices)
    assert [choice.text for choice in results[0].choices] == [choice.text for choice in results[1].choices]


def test_a_template_without_tools_is_told_of(tiny: Any) -> None:
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with LLM(replace(tiny(), chat_template=bare), device="cpu", threads=1, kv_tokens=4096) as llm:
        result = llm.chat(HELLO, SamplingParams(max_tokens=1), tools=[LOOK])
    assert "no place for tools" in result.warnings[0]
    assert len(result.prompt_ids) > 100  # the first user message describes them


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": "look"}, "tools"),
        ({"tools": [{"name": "look"}]}, "tools[0]"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "x", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [LOOK, LOOK]}, "tools[1]"),
        ({"tools": [LOOK], "tool_choice": "must"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "go"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_bad_tools_are_refused_by_name(llm: LLM, more: dict[str, Any], param: str) -> None:
    for answer in (llm.chat, llm.stream):
        with pytest.raises(RequestError) as refused:
            answer(HELLO, **more)
        assert refused.value.param == param


def test_tools_need_a_conversation_and_one_constraint(llm: LLM) -> None:
    with pytest.raises(RequestError, match="conversation"):
        llm.stream("hi", tools=[LOOK])
    with pytest.raises(RequestError, match="twice"):
        llm.chat(HELLO, forced("x"), tools=[LOOK], tool_choice="required")


def test_events_are_those_of_an_answer_without_tools(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=1)
    with llm.stream(HELLO, params, tools=[LOOK]) as stream:
        events = list(stream)
    assert isinstance(events[-1], Finished)
    assert "".join(event.text for event in events if isinstance(event, Text)) == stream.result().text

"""Anthropic's Python client: messages, streams, tools, counting, errors."""

from __future__ import annotations

from typing import Any

import anthropic
from checking import MODEL, URL, check, raises, run

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=300)
USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # newer versions of this client have no such argument
TOOLS: list[Any] = [{
    "name": "get_weather", "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
                     "required": ["city"]},
}]  # fmt: skip


@check
def messages() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=12, messages=USER, system="Be brief.", **GREEDY)
    assert answer.type == "message"
    assert "Paris" in answer.content[0].text  # type: ignore[union-attr]
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens <= 12


@check
def stream_equals_the_whole() -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": USER, **GREEDY}
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(**options)
    assert text == final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert final.usage.output_tokens == whole.usage.output_tokens


@check
def stop_sequences() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=30, messages=USER, **GREEDY, stop_sequences=["Paris"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris")


@check
def prefilled_answer() -> None:
    begun: list[Any] = [*USER, {"role": "assistant", "content": "The capital of France is"}]
    answer = client.messages.create(model=MODEL, max_tokens=6, messages=begun, **GREEDY)
    assert answer.content[0].text.startswith(" Paris")  # type: ignore[union-attr]


@check
def tools_round_trip() -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    answer = client.messages.create(
        model=MODEL, max_tokens=100, messages=USER, tools=TOOLS, tool_choice=choice, **GREEDY
    )
    assert answer.stop_reason == "tool_use"
    call = answer.content[-1]
    assert call.type == "tool_use"
    assert call.input["city"] in ("Rome", "Oslo")  # type: ignore[index]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    history: list[Any] = [
        *USER,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    client.messages.create(model=MODEL, max_tokens=8, messages=history, tools=TOOLS)


@check
def tools_in_a_stream() -> None:
    choice: Any = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=USER, tools=TOOLS, tool_choice=choice, **GREEDY
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert final.content[-1].input["city"] in ("Rome", "Oslo")  # type: ignore[union-attr,index]


@check
def counting() -> None:
    count = client.messages.count_tokens(model=MODEL, messages=USER)
    answer = client.messages.create(model=MODEL, max_tokens=1, messages=USER)
    assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


@check
def system_blocks_and_cache_control() -> None:
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(model=MODEL, max_tokens=4, messages=USER, system=system, **GREEDY)
    assert answer.usage.output_tokens <= 4


@check
def errors() -> None:
    create = client.messages.create
    wrong = {"extra_body": {"temperature": -3}}
    raises(anthropic.BadRequestError, lambda: create(model=MODEL, max_tokens=4, messages=USER, **wrong), "temperature")
    raises(anthropic.NotFoundError, lambda: create(model="claude-9", max_tokens=4, messages=USER), "claude-9")
    long: Any = [{"role": "user", "content": "word " * 20_000}]
    raises(anthropic.BadRequestError, lambda: create(model=MODEL, max_tokens=4, messages=long), "prompt is too long")


run("anthropic")

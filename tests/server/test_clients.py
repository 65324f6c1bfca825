"""Real clients over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from tests.server.harness import PATIENCE, Live

USER: list[Any] = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'


class Place(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    size: Literal[1, 2, 3]


class weather(pydantic.BaseModel):
    place: Literal["Rome", "Oslo"]


@pytest.fixture
def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def test_chat(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, messages=USER, max_completion_tokens=8, logprobs=True, top_logprobs=2, n=2, seed=1,
        extra_body={"min_p": 0.01, "ignore_eos": True},
    )  # fmt: skip
    assert len(answer.choices) == 2
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or ()) == 8
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.model_extra is not None
    assert answer.model_extra["unspool"]["params"]["min_p"] == {"value": 0.01, "origin": "request"}


def test_chat_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=USER,
        max_tokens=12,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = client.chat.completions.create(model=chunks[0].model, messages=USER, max_tokens=12, seed=3)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=client.models.list().data[0].id, messages=USER, response_format=Place, max_tokens=80
    )
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    assert parsed.city in ("Rome", "Oslo")


def test_tools(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(weather)
    answer = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=USER,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    call = (answer.choices[0].message.tool_calls or [])[0]
    assert isinstance(call.function.parsed_arguments, weather)
    free = client.chat.completions.create(
        model=answer.model, messages=USER, tools=[tool], max_tokens=12, temperature=2, seed=1
    )
    assert free.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_tools_stream(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(weather)
    tool["function"]["strict"] = False
    with client.chat.completions.stream(
        model=client.models.list().data[0].id,
        messages=USER,
        tools=[tool],
        max_tokens=200,
        extra_body={"constraint": {"kind": "choice", "value": ["Well.\n" + CALL]}},
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    message = final.choices[0].message
    assert message.content == "Well."
    assert json.loads((message.tool_calls or [])[0].function.arguments) == {"place": "Rome"}
    assert final.choices[0].finish_reason == "tool_calls"
    history = [*USER, message.model_dump(exclude={"parsed"})]
    history.append({"role": "tool", "tool_call_id": (message.tool_calls or [])[0].id, "content": "sunny"})
    for call in history[1]["tool_calls"]:
        call["function"].pop("parsed_arguments")
    client.chat.completions.create(model=final.model, messages=history, tools=[tool], max_tokens=3)


def test_completions(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, prompt=["ab", "cd"], echo=True, max_tokens=3, logprobs=1, seed=1)
    assert [choice.text[:2] for choice in answer.choices] == ["ab", "cd"]
    parts = list(client.completions.create(model=model, prompt="ab", max_tokens=6, seed=1, stream=True))
    whole = client.completions.create(model=model, prompt="ab", max_tokens=6, seed=1)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_responses(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    more = {"seed": 1, "ignore_eos": True}
    answer = client.responses.create(model=model, input="Hello", max_output_tokens=8, store=False, extra_body=more)
    assert answer.output_text
    with client.responses.stream(model=model, input="Hello", text_format=Place, max_output_tokens=80) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    assert isinstance(final.output_parsed, Place)


def test_responses_go_on_with_the_items_as_they_came(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    tool = {"type": "function", "name": "weather", "parameters": weather.model_json_schema()}
    answer = client.responses.create(
        model=model,
        input="Hello",
        tools=[tool],  # type: ignore[list-item]
        max_output_tokens=200,
        extra_body={"constraint": {"kind": "choice", "value": ["Well.\n" + CALL]}},
    )
    assert [item.type for item in answer.output] == ["message", "function_call"]
    history: list[Any] = [{"role": "user", "content": "Hello"}]
    history += [item.model_dump(by_alias=True) for item in answer.output]
    call_id = answer.output[1].call_id  # type: ignore[union-attr]
    history.append({"type": "function_call_output", "call_id": call_id, "output": "sunny"})
    client.responses.create(model=model, input=history, max_output_tokens=3)


def test_errors_are_the_clients_own(client: openai.OpenAI, server: Live) -> None:
    model = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=USER, temperature=-3)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as overflow:
        client.completions.create(model=model, prompt="x" * 3000)
    assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=USER)
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model=model, input="x")
    assert refused.value.request_id is not None


def test_async_clients_share_the_engine(server: Live) -> None:
    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        model = (await client.models.list()).data[0].id

        async def stream(seed: int) -> str:
            parts = await client.chat.completions.create(
                model=model, messages=USER, max_tokens=20, seed=seed, temperature=1.5, stream=True
            )
            return "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])

        alone = [await stream(seed) for seed in range(4)]
        together = await asyncio.gather(*(stream(seed % 4) for seed in range(32)))
        assert together == alone * 8
        await client.close()

    asyncio.run(run())


def test_anthropics_client(server: Live) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE)
    answer = client.messages.create(model=server.service.name, max_tokens=6, messages=USER, system="Be.")
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert answer.usage.output_tokens <= 6
    tools: list[Any] = [
        {"name": "weather", "input_schema": weather.model_json_schema() | {"additionalProperties": False}}
    ]
    with client.messages.stream(
        model=server.service.name,
        max_tokens=200,
        messages=USER,
        tools=tools,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert final.content[0].type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": final.content[0].id, "content": "sunny"}
    history: list[Any] = [
        *USER,
        {"role": "assistant", "content": [block.model_dump() for block in final.content]},
        {"role": "user", "content": [result]},
    ]
    client.messages.create(model=server.service.name, max_tokens=3, messages=history, tools=tools)
    count = client.messages.count_tokens(model=server.service.name, messages=USER)
    assert count.input_tokens > 0
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        client.messages.create(
            model=server.service.name, max_tokens=6, messages=USER, thinking={"type": "enabled", "budget_tokens": 2000}
        )

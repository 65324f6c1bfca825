"""OpenAI's Python client: chat, completions, responses, their streams, tools, schemas, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pydantic
from checking import MODEL, URL, check, raises, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


class Person(pydantic.BaseModel):
    name: str
    age: int


class get_weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


TOOL = openai.pydantic_function_tool(get_weather)


@check
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=12, temperature=0)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def chat_stream_equals_the_whole() -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 24, "seed": 3, "temperature": 0.8}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


@check
def several_choices_and_logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=5, n=3, seed=1, logprobs=True, top_logprobs=4
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert "".join(token.token for token in content) == choice.message.content
        assert all(len(token.top_logprobs) >= 4 and token.logprob <= 0 for token in content)


@check
def stop_strings() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=30, temperature=0, stop=["Paris"])
    assert answer.choices[0].finish_reason == "stop"
    assert "Paris" not in (answer.choices[0].message.content or "")


@check
def parsed_answers() -> None:
    messages: list[Any] = [{"role": "user", "content": "Extract: Bob is 47 years old."}]
    answer = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Person, temperature=0, max_tokens=60
    )
    assert answer.choices[0].message.parsed == Person(name="Bob", age=47)


@check
def parsed_stream() -> None:
    messages: list[Any] = [{"role": "user", "content": "Extract: Bob is 47 years old."}]
    with client.chat.completions.stream(
        model=MODEL, messages=messages, response_format=Person, temperature=0, max_tokens=60
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.done" in kinds
    assert final.choices[0].message.parsed == Person(name="Bob", age=47)


@check
def json_mode() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, response_format={"type": "json_object"}, temperature=0, max_tokens=200
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@check
def tools_round_trip() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=USER, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    message = answer.choices[0].message
    call = (message.tool_calls or [])[0]
    assert isinstance(call.function.parsed_arguments, get_weather)
    assert answer.choices[0].finish_reason == "tool_calls"
    history = [*USER, {"role": "assistant", "tool_calls": [{
        "id": call.id, "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.arguments},
    }]}, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]  # fmt: skip
    client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL], max_tokens=8)


@check
def tools_in_a_stream() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=USER, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert (final.choices[0].message.tool_calls or [])[0].function.name == "get_weather"


@check
def named_tool() -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL], tool_choice=choice, temperature=0)
    assert (answer.choices[0].message.tool_calls or [])[0].function.name == "get_weather"  # type: ignore[union-attr]


@check
def completions() -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["The sea is", "The sky is"], max_tokens=4, temperature=0, logprobs=2, echo=True
    )
    assert [choice.text[:10] for choice in answer.choices] == ["The sea is", "The sky is"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens is not None
    assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text
    options: dict[str, Any] = {"model": MODEL, "prompt": "The sea is", "max_tokens": 8, "seed": 1}
    parts = client.completions.create(**options, stream=True)
    assert "".join(part.choices[0].text for part in parts) == client.completions.create(**options).choices[0].text


@check
def responses() -> None:
    answer = client.responses.create(model=MODEL, input="What is the capital of France?", max_output_tokens=12,
                                     temperature=0, store=False)  # fmt: skip
    assert "Paris" in answer.output_text
    with client.responses.stream(
        model=MODEL, input="Extract: Bob is 47 years old.", text_format=Person, temperature=0, max_output_tokens=60
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    assert final.output_parsed == Person(name="Bob", age=47)


@check
def responses_with_tools() -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": get_weather.model_json_schema()}
    answer = client.responses.create(model=MODEL, input="Weather in Rome?", tools=[tool], tool_choice="required")
    call = next(item for item in answer.output if item.type == "function_call")
    history: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
    history += [item.model_dump(exclude_none=True) for item in answer.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    client.responses.create(model=MODEL, input=history, max_output_tokens=8)


@check
def errors() -> None:
    create = client.chat.completions.create
    error = raises(openai.BadRequestError, lambda: create(model=MODEL, messages=USER, temperature=-3), "temperature")
    assert isinstance(error, openai.BadRequestError)
    assert error.param == "temperature"
    raises(openai.NotFoundError, lambda: create(model="gpt-9", messages=USER), "gpt-9")
    long: Any = [{"role": "user", "content": "word " * 20_000}]
    overflow = raises(openai.BadRequestError, lambda: create(model=MODEL, messages=long), "maximum context length")
    assert isinstance(overflow, openai.BadRequestError)
    assert overflow.code == "context_length_exceeded"


@check
def asynchronous_crowd() -> None:
    async def gather() -> tuple[list[str | None], str | None]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as own:

            async def ask(seed: int) -> str | None:
                answer = await own.chat.completions.create(model=MODEL, messages=USER, max_tokens=12, seed=seed)
                return answer.choices[0].message.content

            alone = await ask(5)
            return await asyncio.gather(*(ask(seed) for seed in range(8))), alone

    crowd, alone = asyncio.run(gather())
    assert crowd[5] == alone


run("openai")

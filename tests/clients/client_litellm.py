"""LiteLLM, by OpenAI's API and by Anthropic's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
from checking import MODEL, URL, check, raises, run

litellm.suppress_debug_info = True
USER = [{"role": "user", "content": "What is the capital of France?"}]
OPENAI: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0}
ANTHROPIC: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "temperature": 0}
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
                   "required": ["city"]},
}}  # fmt: skip
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def text_of(answer: Any) -> str:
    return answer.choices[0].message.content or ""


@check
def openai_provider() -> None:
    answer = litellm.completion(**OPENAI, messages=USER, max_tokens=12)
    assert "Paris" in text_of(answer)
    assert answer.usage.completion_tokens <= 12


@check
def openai_stream() -> None:
    whole = litellm.completion(**OPENAI, messages=USER, max_tokens=24)
    chunks = list(litellm.completion(**OPENAI, messages=USER, max_tokens=24, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(whole)
    rebuilt = litellm.stream_chunk_builder(chunks, messages=USER)
    assert text_of(rebuilt) == text_of(whole)
    assert rebuilt.choices[0].finish_reason == whole.choices[0].finish_reason


@check
def text_completion() -> None:
    options = {**OPENAI, "model": f"text-completion-openai/{MODEL}"}
    assert litellm.text_completion(**options, prompt="The sea is", max_tokens=4).choices[0].text


@check
def anthropic_provider_and_stream() -> None:
    whole = litellm.completion(**ANTHROPIC, messages=USER, max_tokens=12)
    assert "Paris" in text_of(whole)
    chunks = litellm.completion(**ANTHROPIC, messages=USER, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(whole)


@check
def tools() -> None:
    for provider in (OPENAI, ANTHROPIC):
        answer = litellm.completion(**provider, messages=USER, tools=[WEATHER], tool_choice=NAMED, max_tokens=60)
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


@check
def json_schema() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    messages = [{"role": "user", "content": "Extract: Bob is 47 years old."}]
    answer = litellm.completion(**OPENAI, messages=messages, response_format=format, max_tokens=60)
    assert json.loads(text_of(answer)) == {"name": "Bob", "age": 47}


@check
def asynchronous() -> None:
    assert "Paris" in text_of(asyncio.run(litellm.acompletion(**OPENAI, messages=USER, max_tokens=12)))


@check
def errors() -> None:
    long = [{"role": "user", "content": "word " * 20_000}]
    for provider in (OPENAI, ANTHROPIC):
        raises(litellm.ContextWindowExceededError, lambda p=provider: litellm.completion(**p, messages=long))  # type: ignore[misc]
    raises(litellm.BadRequestError, lambda: litellm.completion(**OPENAI, messages=USER, top_p=7), "top_p")
    unknown = {**OPENAI, "model": "openai/gpt-9"}
    raises(litellm.NotFoundError, lambda: litellm.completion(**unknown, messages=USER), "gpt-9")


run("litellm")

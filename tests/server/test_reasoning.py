"""Continued answers and reasoning, in every API's words; a stream gives what the whole answer has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import Client, in_process, make_llm
from unspool.llm import LLM

THINKING = """\
{%- for message in messages %}<s>{{ message.role }}:
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}</s>
{%- endfor %}{% if add_generation_prompt %}<s>assistant:
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
OPENED = THINKING + "{% if add_generation_prompt %}<think>{% endif %}"
USER: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def thinker(template: str = THINKING) -> LLM:
    return make_llm(template)


# Continuing -----------------------------------------------------------------------------------------------------------
def test_an_answer_that_is_continued_by_its_ids_is_what_would_have_followed() -> None:
    async def test(client: Client) -> None:
        ask = {"messages": USER, "seed": 5, "logprobs": True, "max_tokens": 12, "ignore_eos": True}
        whole = (await client.ok(CHAT, ask))["choices"][0]["logprobs"]["content"]
        ids = [token["id"] for token in whole]
        begun = [*USER, {"role": "assistant", "token_ids": ids[:7]}]
        rest = await client.ok(CHAT, {**ask, "messages": begun, "max_tokens": 5})
        assert [token["id"] for token in rest["choices"][0]["logprobs"]["content"]] == ids[7:]
        assert [token["logprob"] for token in rest["choices"][0]["logprobs"]["content"]] == [
            token["logprob"] for token in whole[7:]
        ]

    in_process(test)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "<s>user:Hello</s><s>assistant:Well, "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<s>user:Hello</s><s>assistant:Well, "),
        ({"add_generation_prompt": True}, "<s>user:Hello</s><s>assistant:Well, </s><s>assistant:"),
        ({"continue_final_message": False}, "<s>user:Hello</s><s>assistant:Well, </s><s>assistant:"),
        ({"add_generation_prompt": False}, "<s>user:Hello</s><s>assistant:Well, </s>"),
    ],
)
def test_where_a_prompt_ends(more: dict[str, Any], text: str) -> None:
    async def test(client: Client) -> None:
        begun = [*USER, {"role": "assistant", "content": "Well, "}]
        ids = (await client.ok("/tokenize", {"messages": begun, **more}))["tokens"]
        assert client.service.llm.tokenizer.decode(ids, skip_special=False) == text
        answer = await client.ok(CHAT, {"messages": begun, "max_tokens": 1, **more})
        assert answer["usage"]["prompt_tokens"] == len(ids)

    in_process(test)


def test_every_api_continues_a_final_answer() -> None:
    async def test(client: Client) -> None:
        begun = [*USER, {"role": "assistant", "content": "Well"}]
        expected = len((await client.ok("/tokenize", {"messages": begun}))["tokens"])
        message = await client.ok(MESSAGES, {"messages": begun, "max_tokens": 1})
        assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == expected
        assert (await client.ok(MESSAGES + "/count_tokens", {"messages": begun}))["input_tokens"] == expected
        response = await client.ok(RESPONSES, {"input": begun, "max_output_tokens": 1})
        assert response["usage"]["input_tokens"] == expected

    in_process(test)


def test_tool_calls_without_results_cannot_be_continued() -> None:
    async def test(client: Client) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        error = await client.refused(CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]})
        assert error["param"] == "messages"
        assert "results" in error["message"]

    in_process(test)


# Reasoning ------------------------------------------------------------------------------------------------------------
async def thought(client: Client) -> list[dict[str, Any]]:
    """A conversation at whose end the model has thought already; it goes on with thinking."""
    return [*USER, {"role": "assistant", "reasoning_content": "one"}]


def test_thinking_is_told_apart_whole_and_streamed() -> None:
    async def test(client: Client) -> None:
        ask = {"messages": await thought(client), "thinking_budget": 6, "max_tokens": 40, "seed": 3, "temperature": 0.7}
        whole = await client.ok(CHAT, ask)
        message = whole["choices"][0]["message"]
        assert message["reasoning_content"]
        assert message["reasoning"] == message["reasoning_content"]
        assert "</think>" not in message["reasoning"] + message["content"]
        used = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 6 < used < whole["usage"]["completion_tokens"]
        events = [event for _, event in await client.events(CHAT, ask) if event != "[DONE]"]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        for name in ("reasoning_content", "content"):
            assert "".join(delta.get(name) or "" for delta in deltas) == message[name]

    in_process(test, llm=thinker())


def test_anthropics_thinking_blocks() -> None:
    async def test(client: Client) -> None:
        begun = [*USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "one", "signature": "x"}]}]
        ask = {"messages": begun, "max_tokens": 40, "seed": 3}
        ask["thinking"] = {"type": "enabled", "budget_tokens": 6}
        whole = await client.ok(MESSAGES, ask)
        kinds = [block["type"] for block in whole["content"]]
        assert kinds == ["thinking", "text"]
        assert whole["content"][0]["signature"]
        events = [event for _, event in await client.events(MESSAGES, ask)]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert [delta["type"] for delta in deltas if delta["type"] == "signature_delta"] == ["signature_delta"]
        assert "".join(delta.get("thinking", "") for delta in deltas) == whole["content"][0]["thinking"]
        assert "".join(delta.get("text", "") for delta in deltas) == whole["content"][1]["text"]
        starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        assert starts == kinds

    in_process(test, llm=thinker())


def test_responses_have_reasoning_items() -> None:
    async def test(client: Client) -> None:
        item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "one"}], "summary": []}
        begun = [*USER, item, {"role": "assistant", "content": ""}]
        ask = {"input": begun, "max_output_tokens": 40, "thinking_budget": 6, "seed": 3}
        whole = await client.ok(RESPONSES, ask)
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
        events = [event for _, event in await client.events(RESPONSES, ask)]
        streamed = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
        assert streamed == whole["output"][0]["content"][0]["text"]
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 6

    in_process(test, llm=thinker())


def test_a_format_holds_for_what_follows_thinking() -> None:
    async def test(client: Client) -> None:
        ask = {"messages": USER, "constraint": {"kind": "choice", "value": ["yes"]}, "thinking_budget": 4}
        message = (await client.ok(CHAT, ask))["choices"][0]["message"]
        assert message["reasoning"]
        assert message["content"] == "yes"
        quiet = {"messages": USER, "constraint": {"kind": "choice", "value": ["yes"]}}
        assert (await client.ok(CHAT, quiet | {"thinking_budget": 0}))["choices"][0]["message"]["content"] == "yes"

    in_process(test, llm=thinker(OPENED))


def test_thinking_is_turned_off_where_the_template_can() -> None:
    async def test(client: Client) -> None:
        async def prompt(**more: Any) -> str:
            ids = (await client.ok("/tokenize", {"messages": USER, **more}))["tokens"]
            return client.service.llm.tokenizer.decode(ids, skip_special=False)

        assert not (await prompt()).endswith("</think>")
        assert (await prompt(enable_thinking=False)).endswith("<think></think>")
        assert (await prompt(chat_template_kwargs={"enable_thinking": False})).endswith("<think></think>")
        off = {"messages": USER, "max_tokens": 8, "reasoning_effort": "none"}
        answer = await client.ok(CHAT, off)
        assert "reasoning" not in answer["choices"][0]["message"]
        assert answer["usage"]["prompt_tokens"] > len(await prompt())
        body = {"messages": USER, "max_tokens": 8, "thinking": {"type": "disabled"}, "ignore_eos": True}
        assert (await client.ok(MESSAGES, body))["content"][0]["type"] == "text"

    in_process(test, llm=thinker())

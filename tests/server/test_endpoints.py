"""Completions, responses, messages, scores and tokens: each in its own shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.harness import Client, in_process
from unspool.server.config import ServerConfig
from unspool.version import VERSION

TOOL = {"name": "go", "parameters": {"type": "object", "properties": {"to": {"enum": ["x", "y"]}}, "required": ["to"]}}
CALL = '<tool_call>\n{"name": "go", "arguments": {"to": "x"}}\n</tool_call>'


def forced(text: str) -> dict[str, Any]:
    return {"kind": "choice", "value": [text]}


# Completions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompt", "count"), [("ab", 1), (["ab", "cd"], 2), ([65, 66], 1), ([[65, 66], [67]], 2), (["ab", [67]], 2)]
)
def test_prompts_in_all_their_forms(prompt: Any, count: int) -> None:
    async def test(client: Client) -> None:
        answer = await client.ok("/v1/completions", {"prompt": prompt, "n": 2, "max_tokens": 4})
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
        events = await client.events("/v1/completions", {"prompt": prompt, "n": 2, "max_tokens": 4})
        ends = [c["index"] for _, d in events[:-1] for c in d["choices"] if c["finish_reason"]]
        assert sorted(ends) == list(range(2 * count))

    in_process(test)


def test_completions_have_openais_default_length_and_say_so() -> None:
    async def test(client: Client) -> None:
        answer = await client.ok("/v1/completions", {"prompt": "a", "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["unspool"]["params"]["max_tokens"] == {"value": 16, "origin": "api"}

    in_process(test)


def test_text_offsets_are_exact() -> None:
    async def test(client: Client) -> None:
        body = {"prompt": "h☃é", "echo": True, "logprobs": 0, "max_tokens": 0}  # a token a byte
        choice = (await client.ok("/v1/completions", body))["choices"][0]
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 2]
        body = {"prompt": "a", "logprobs": 0, "max_tokens": 60, "temperature": 1.5, "seed": 3, "ignore_eos": True}
        choice = (await client.ok("/v1/completions", body))["choices"][0]
        offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        for start, end, token in zip(offsets, [*offsets[1:], len(choice["text"])], tokens, strict=True):
            if token.isascii():
                assert choice["text"][start:end].endswith(token) or token.startswith(("<", "bytes:"))
        chunks = [event for _, event in await client.events("/v1/completions", body) if event != "[DONE]"]
        reported = [offset for c in chunks for offset in (c["choices"][0]["logprobs"] or {}).get("text_offset", [])]
        assert reported == offsets

    in_process(test)


def test_echo_scores_the_prompt() -> None:
    async def test(client: Client) -> None:
        body = {"prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": 0}
        choice = (await client.ok("/v1/completions", body))["choices"][0]
        assert choice["text"] == "hello"
        assert choice["logprobs"]["tokens"] == list("hello")
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        assert all(len(top) in (2, 3) for top in choice["logprobs"]["top_logprobs"][1:])
        score = await client.ok("/v1/score", {"input": "hello"})
        logprobs = [token["logprob"] for token in score["data"][0]["tokens"]]
        assert logprobs == choice["logprobs"]["token_logprobs"]
        assert score["data"][0]["logprob"] == sum(logprobs[1:])
        events = await client.events("/v1/completions", {"prompt": "hello", "echo": True, "max_tokens": 2})
        assert events[0][1]["choices"][0]["text"] == "hello"
        assert (await client.refused("/v1/completions", body | {"stream": True}))["param"] == "echo"

    in_process(test)


def test_alternatives_tell_the_chosen_token_and_all_bytes() -> None:
    async def test(client: Client) -> None:
        body = {"prompt": "a", "temperature": 3, "max_tokens": 40, "seed": 3, "ignore_eos": True}
        for count in (0, 1, 20):
            found = (await client.ok("/v1/completions", body | {"logprobs": count}))["choices"][0]["logprobs"]
            for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
                assert top[token] == value
                assert len(top) in (count, count + 1)  # no two share a key; the chosen one may be among them
        assert any(token.startswith("bytes:\\x") for token in found["tokens"])

    in_process(test)


def test_mixed_and_many_prompts_are_refused() -> None:
    async def test(client: Client) -> None:
        assert (await client.refused("/v1/completions", {"prompt": [1, "a"]}))["param"] == "prompt"
        assert (await client.refused("/v1/completions", {"prompt": ["a"] * 300}))["param"] == "prompt"
        assert (await client.refused("/v1/completions", {"prompt": []}))["param"] == "prompt"
        assert (await client.refused("/v1/completions", {"prompt": ""}))["param"] == "prompt"
        assert (await client.refused("/v1/completions", {"prompt": "a", "suffix": "b"}))["param"] == "suffix"

    in_process(test)


# Responses ----------------------------------------------------------------------------------------------------------
def test_response_events_in_their_order() -> None:
    async def test(client: Client) -> None:
        body = {"input": "hi", "max_output_tokens": 100, "constraint": forced("So.\n" + CALL), "seed": 1}
        body |= {"tools": [{"type": "function", **TOOL}], "include": ["message.output_text.logprobs"]}
        events = await client.events("/v1/responses", body)
        assert all(name == data["type"] for name, data in events)
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        names = [name for name, _ in events]
        deltas = ("response.output_text.delta", "response.function_call_arguments.delta")
        assert [name for name in names if name not in deltas] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        text = "".join(data["delta"] for name, data in events if name == deltas[0])
        arguments = "".join(data["delta"] for name, data in events if name == deltas[1])
        final = events[-1][1]["response"]
        message, call = final["output"]
        assert text == message["content"][0]["text"] == "So."
        assert arguments == call["arguments"]
        assert json.loads(arguments) == {"to": "x"}
        whole = await client.ok("/v1/responses", body)
        assert [_bare(item) for item in whole["output"]] == [_bare(item) for item in final["output"]]
        assert whole["usage"]["output_tokens"] == final["usage"]["output_tokens"]

    in_process(test)


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    """Without what is drawn anew for each response; logprobs travel with the part that they came with."""
    bare = {key: value for key, value in item.items() if key not in ("id", "call_id", "content")}
    return bare | {"text": [part["text"] for part in item.get("content", ())]}


def test_responses_say_how_they_ended() -> None:
    async def test(client: Client) -> None:
        cut = await client.ok("/v1/responses", {"input": "hi", "max_output_tokens": 3, "ignore_eos": True})
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        late = await client.ok("/v1/responses", {"input": "hi", "deadline_ms": 0.001, "ignore_eos": True})
        assert late["incomplete_details"] == {"reason": "max_output_tokens"}
        assert late["unspool"]["choices"][0]["finish_reason"] == "deadline"
        done = await client.ok("/v1/responses", {"input": "hi", "constraint": forced("yes"), "instructions": "Be."})
        assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "yes")

    in_process(test)


def test_responses_take_items_and_refuse_what_is_stored() -> None:
    async def test(client: Client) -> None:
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {
                "type": "function_call",
                "call_id": "c",
                "name": "go",
                "arguments": '{"to": "x"}',
                "caller": None,
                "namespace": None,
                "async": None,
            },
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "there"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "ok", "annotations": []}],
                "phase": None,
            },
            {"role": "user", "content": "And back?"},
        ]
        await client.ok("/v1/responses", {"input": items, "max_output_tokens": 2})
        for name, value in {
            "previous_response_id": "x",
            "store": True,
            "truncation": "auto",
            "background": True,
        }.items():
            assert (await client.refused("/v1/responses", {"input": "x", name: value}))["param"] == name

    in_process(test)


# Anthropic's messages -----------------------------------------------------------------------------------------------
def test_message_events_in_their_order() -> None:
    async def test(client: Client) -> None:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 200,
            "constraint": forced("So.\n" + CALL),
        }
        body["tools"] = [{"name": "go", "input_schema": TOOL["parameters"]}]
        events = await client.events("/v1/messages", body)
        assert all(name == data["type"] for name, data in events)
        assert [name for name, _ in events if name != "content_block_delta"] == [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
        assert "".join(delta.get("text", "") for delta in deltas) == "So."
        assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"to": "x"}
        whole = await client.ok("/v1/messages", body)
        assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
        assert whole["content"][1]["input"] == {"to": "x"}
        assert whole["stop_reason"] == events[-2][1]["delta"]["stop_reason"] == "tool_use"
        assert whole["usage"]["output_tokens"] == events[-2][1]["usage"]["output_tokens"]

    in_process(test)


@pytest.mark.parametrize(
    ("more", "reason", "sequence"),
    [
        ({"max_tokens": 2, "ignore_eos": True}, "max_tokens", None),
        ({"max_tokens": 9, "constraint": forced("one two")}, "end_turn", None),
        ({"max_tokens": 9, "constraint": forced("one two"), "stop_sequences": ["tw"]}, "stop_sequence", "tw"),
    ],
)
def test_messages_say_why_they_ended(more: dict[str, Any], reason: str, sequence: str | None) -> None:
    async def test(client: Client) -> None:
        answer = await client.ok("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], **more})
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)

    in_process(test)


def test_messages_have_their_own_errors_and_blocks() -> None:
    async def test(client: Client) -> None:
        response = await client.post("/v1/messages", {"messages": [{"role": "user", "content": "x"}]})
        assert response.status_code == 400
        assert response.json()["type"] == "error"
        assert response.json()["error"] == {"type": "invalid_request_error", "message": "max_tokens is missing"}
        conversation = [
            {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I go.", "citations": None},
                    {
                        "type": "tool_use",
                        "id": "t1",
                        "name": "go",
                        "input": {"to": "x"},
                        "caller": None,
                        "toolset_name": None,
                    },
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True}],
            },
        ]
        body = {"messages": conversation, "max_tokens": 2, "system": [{"type": "text", "text": "Be."}]}
        answer = await client.ok("/v1/messages", body)
        count = await client.ok("/v1/messages/count_tokens", {key: body[key] for key in ("messages", "system")})
        assert count["input_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
        image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        response = await client.post(
            "/v1/messages", {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1}
        )
        assert response.json()["error"]["message"] == (
            'messages[0].content[0].type is "image"; images are not supported: the models served here read text'
        )
        late = {"messages": conversation, "max_tokens": 9, "deadline_ms": 0.001, "ignore_eos": True}
        assert (await client.ok("/v1/messages", late))["stop_reason"] == "max_tokens"
        swapped = [{"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "go", "input": {}}]}]
        await client.refused("/v1/messages", {"messages": swapped, "max_tokens": 1})

    in_process(test)


def test_a_tokenizer_is_told_as_lm_eval_asks() -> None:
    async def test(client: Client) -> None:
        found = (await client.get("/tokenizer_info")).json()
        assert {"bos_token", "eos_token", "chat_template"} <= found.keys()
        assert found["chat_template"] == client.service.llm.template.source

    in_process(test)


# Tokens, scores, models ---------------------------------------------------------------------------------------------
def test_tokens_there_and_back() -> None:
    async def test(client: Client) -> None:
        tokens = await client.ok("/tokenize", {"prompt": "héllo", "return_token_strs": True})
        assert len(tokens["token_strs"]) == tokens["count"] == 6
        assert await client.ok("/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": "héllo", "content": "héllo"}
        assert (await client.refused("/detokenize", {"tokens": [1, 99_999]}))["param"] == "tokens[1]"
        assert (await client.refused("/tokenize", {}))["param"] == "prompt"
        tokenizer = client.service.llm.tokenizer
        end = min(tokenizer.special_ids)
        mark = tokenizer.token_text(end)
        for body, first in (({}, [end]), ({"parse_special": False}, None), ({"prompt": mark + "!"}, None)):
            ids = (await client.ok("/tokenize", {"prompt": mark, "add_special_tokens": False, **body}))["tokens"]
            assert (ids == [end]) == (first is not None)
        misplaced = {"prompt": "x", "add_generation_prompt": True}
        assert (await client.refused("/tokenize", misplaced))["param"] == "add_generation_prompt"
        plain, special = ({"prompt": "<|endoftext|>", "parse_special": flag} for flag in (False, True))
        assert (await client.ok("/tokenize", plain))["count"] == 13
        assert (await client.ok("/tokenize", special))["tokens"] == [256]

    in_process(test)


def test_scores_of_many() -> None:
    async def test(client: Client) -> None:
        answer = await client.ok("/v1/score", {"input": ["hello", [65, 66]], "top_logprobs": 3})
        assert [len(one["tokens"]) for one in answer["data"]] == [5, 2]
        assert all(len(token["top_logprobs"]) == 3 for token in answer["data"][0]["tokens"][1:])
        assert answer["usage"]["total_tokens"] == 7

    in_process(test)


def test_models_and_names() -> None:
    async def test(client: Client) -> None:
        listed = (await client.get("/v1/models")).json()["data"]
        name = listed[0]["id"]
        assert (await client.get(f"/v1/models/{name}")).json()["id"] == name
        missing = await client.get("/v1/models/org/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        error = await client.refused("/v1/completions", {"prompt": "a", "model": "gpt-9"}, 404)
        assert error["code"] == "model_not_found"
        await client.ok("/v1/completions", {"prompt": "a", "model": name})

    in_process(test)


def test_a_model_with_several_names_is_listed_once() -> None:
    async def test(client: Client) -> None:
        (entry,) = (await client.get("/v1/models")).json()["data"]
        own = client.service.llm.checkpoint.name
        assert (entry["id"], entry["root"], entry["aliases"]) == ("ours", own, ["theirs", own])
        assert (await client.get("/v1/models/theirs")).json()["aliases"] == ["ours", own]
        for name in ("ours", "theirs", own):
            await client.ok("/v1/completions", {"prompt": "a", "model": name, "max_tokens": 1})

    in_process(test, ServerConfig(names=("ours", "theirs"), log_format="off"))


def test_a_text_model_does_not_embed() -> None:
    async def test(client: Client) -> None:
        assert (await client.refused("/v1/embeddings", {"input": "x"}))["code"] == "model_does_not_embed"

    in_process(test)


def test_prompts_are_counted() -> None:
    async def test(client: Client) -> None:
        chat = {"messages": [{"role": "user", "content": "Hello"}]}
        for path, body in (("/v1/chat/completions", chat), ("/v1/responses", {"input": "Hello"})):
            reported = await client.ok(f"{path}/input_tokens", body)
            answer = await client.ok(path, body | {"max_output_tokens" if "input" in body else "max_tokens": 1})
            usage = answer["usage"]
            assert reported["input_tokens"] == usage.get("input_tokens", usage.get("prompt_tokens"))

    in_process(test)


def test_conversations_are_tokenized_with_and_without_bos() -> None:
    async def test(client: Client) -> None:
        ask = {"messages": [{"role": "user", "content": "Hello"}]}
        without = await client.ok("/tokenize", {**ask, "add_special_tokens": False})
        assert without == await client.ok("/tokenize", ask)
        assert without["token_strs"] is None
        bos = (await client.ok("/tokenize", {"prompt": ""}))["tokens"]
        assert (await client.ok("/tokenize", {**ask, "add_special_tokens": True}))["tokens"] == bos + without["tokens"]

    in_process(test)


def test_the_version() -> None:
    async def test(client: Client) -> None:
        assert (await client.get("/version")).json() == {"version": VERSION}

    in_process(test)

"""Other engines' fields: each does what ours does, is accepted because it changes nothing, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import Client, in_process
from unspool.server import engines
from unspool.server.kinds import treatment

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]
GBNF = 'root ::= "yes" | "no"'
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"include_stop_str_in_output": True, "stop": "I"}, {"include_stop_str": True, "stop": "I"}),
        ({"no_stop_trim": True, "stop": "I"}, {"include_stop_str": True, "stop": "I"}),
        ({"guided_regex": "[ab]{4}"}, {"constraint": {"kind": "regex", "value": "[ab]{4}"}}),
        ({"regex": "[ab]{4}"}, {"constraint": {"kind": "regex", "value": "[ab]{4}"}}),
        ({"guided_choice": ["yes"]}, {"constraint": {"kind": "choice", "value": ["yes"]}}),
        ({"guided_json": SCHEMA}, {"constraint": {"kind": "json_schema", "value": SCHEMA}}),
        ({"json_schema": SCHEMA}, {"constraint": {"kind": "json_schema", "value": SCHEMA}}),
        ({"grammar": GBNF}, {"constraint": {"kind": "grammar", "value": GBNF}}),
        ({"ebnf": GBNF}, {"constraint": {"kind": "grammar", "value": GBNF}}),
        ({"guided_grammar": GBNF}, {"constraint": {"kind": "grammar", "value": GBNF}}),
        ({"structured_outputs": {"choice": ["no"]}}, {"constraint": {"kind": "choice", "value": ["no"]}}),
        ({"structured_outputs": {"json_object": True}}, {"constraint": {"kind": "json_object"}}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            {"constraint": {"kind": "json_schema", "value": {**SCHEMA, "x-unspool": {"whitespace": "compact"}}}},
        ),
        (
            {"repeat_penalty": 1.3},
            {"repetition_penalty": 1.3, "penalty_window": 64, "penalty_scope": "all"},
        ),
        ({"repeat_penalty": 1.3, "repeat_last_n": 0}, {}),
        (
            {"repeat_penalty": 1.3, "repeat_last_n": 3},
            {"repetition_penalty": 1.3, "penalty_window": 3, "penalty_scope": "all"},
        ),
        (
            {"samplers": ["top_k", "temperature"], "top_k": 4},
            {"order": ["bias", "allowed", "constraint", "top_k", "temperature"], "top_k": 4},
        ),
        ({"use_beam_search": True, "n": 2}, {"beam": {"width": 2}, "n": 2}),
        (
            {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}},
            {"repetition_detector": {"period": 4, "repeats": 2}},
        ),
        ({"extra_key": "a"}, {"cache_salt": "a"}),
        ({"cache_prompt": False, "mirostat": 0, "id_slot": -1, "session_id": "s", "lora": []}, {}),
    ],
)  # fmt: skip
def test_what_a_field_becomes(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    async def test(client: Client) -> None:
        for path, prompt in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "Hello"})):
            base = {**prompt, "seed": 7, "max_tokens": 12}
            if "n_predict" in theirs:
                del base["max_tokens"]
            answers = [await client.ok(path, base | more) for more in (theirs, ours)]
            texts = [[choice.get("text", choice.get("message")) for choice in one["choices"]] for one in answers]
            assert texts[0] == texts[1]
            params = [{name: one["value"] for name, one in each["unspool"]["params"].items()} for each in answers]
            assert params[0] == params[1]

    in_process(test)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"lora_path": "x"}, "lora_path"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"chat_template": "x"}, "chat_template"),
        ({"mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ({"grammar": 'root ::= "a'}, "grammar"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{", "disable_any_whitespace": True}}, "structured_outputs.json"),
        ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
        ({"samplers": ["mystery"]}, "samplers[0]"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"use_beam_search": True, "trace": True}, "trace"),
    ],
)
def test_what_is_refused_is_named_as_it_was_sent(more: dict[str, Any], param: str) -> None:
    async def test(client: Client) -> None:
        for path, prompt in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "Hello"})):
            error = await client.refused(path, prompt | more)
            assert error["param"] == param, error

    in_process(test)


def test_token_ids_are_told() -> None:
    async def test(client: Client) -> None:
        ask = {"seed": 3, "max_tokens": 6, "return_token_ids": True, "return_tokens_as_token_ids": True}
        chat = await client.ok(CHAT, {**ask, "messages": USER, "logprobs": True})
        choice = chat["choices"][0]
        assert len(choice["token_ids"]) == 6
        named = [f"token_id:{id}" for id in choice["token_ids"]]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == named
        assert chat["prompt_token_ids"] == (await client.ok("/tokenize", {"messages": USER}))["tokens"]
        text = (await client.ok(COMPLETIONS, {**ask, "prompt": chat["prompt_token_ids"], "logprobs": 1}))["choices"][0]
        assert text["token_ids"] == choice["token_ids"]
        assert text["prompt_token_ids"] == chat["prompt_token_ids"]
        assert text["logprobs"]["tokens"] == named
        for path, prompt in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": chat["prompt_token_ids"]})):
            events = [event for _, event in await client.events(path, {**ask, **prompt}) if event != "[DONE]"]
            ids = [id for event in events for one in event["choices"] for id in one.get("token_ids", [])]
            assert ids == choice["token_ids"]

    in_process(test)  # fmt: skip


def test_prompt_logprobs_are_written_as_vllm_does() -> None:
    async def test(client: Client) -> None:
        whole = await client.ok(CHAT, {"messages": USER, "max_tokens": 1, "prompt_logprobs": 2})
        ids = (await client.ok("/tokenize", {"messages": USER}))["tokens"]
        assert whole["prompt_logprobs"][0] is None
        assert len(whole["prompt_logprobs"]) == len(ids)
        for id, reported in zip(ids[1:], whole["prompt_logprobs"][1:], strict=True):
            assert reported[str(id)]["logprob"] <= 0
            assert reported[str(id)]["rank"] >= 1
            assert 2 <= len(reported) <= 3
            assert {1, 2} <= {entry["rank"] for entry in reported.values()}
        text = await client.ok(COMPLETIONS, {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 2})
        assert text["choices"][0]["prompt_logprobs"] == whole["prompt_logprobs"]

    in_process(test)


def test_usage_so_far_needs_usage() -> None:
    async def test(client: Client) -> None:
        for path, prompt in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "Hello"})):
            ask = {**prompt, "max_tokens": 3, "stream_options": {"continuous_usage_stats": True}}
            events = [event for _, event in await client.events(path, ask) if event != "[DONE]"]
            assert all(event.get("usage") is None for event in events)

    in_process(test)


def test_prompt_logprobs_are_null_where_nobody_asked() -> None:
    async def test(client: Client) -> None:
        chat = await client.ok(CHAT, {"messages": USER, "max_tokens": 1})
        text = await client.ok(COMPLETIONS, {"prompt": "Hello", "max_tokens": 1})
        assert chat["prompt_logprobs"] is None
        assert text["choices"][0]["prompt_logprobs"] is None

    in_process(test)


def test_usage_and_timings_in_every_chunk() -> None:
    async def test(client: Client) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        for path, prompt in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "Hello"})):
            ask = {**prompt, "max_tokens": 5, "ignore_eos": True, "stream_options": options, "timings_per_token": True}
            events = [event for _, event in await client.events(path, ask) if event != "[DONE]"]
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts)
            assert counts[-1] == 5
            assert all(event["usage"]["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"] for event in events)
            reported = [event["timings"] for event in events if event["choices"]]
            assert reported[-1]["predicted_n"] == 5
            assert all(one["prompt_n"] > 0 for one in reported)

    in_process(test)


def test_special_tokens_are_shown_when_asked_for() -> None:
    async def test(client: Client) -> None:
        tokenizer = client.service.llm.tokenizer
        end = special = min(tokenizer.eos_ids)
        ask = {"prompt": "Hello", "max_tokens": 2, "allowed_token_ids": [special], "ignore_eos": True}
        hidden = await client.ok(COMPLETIONS, ask)
        assert hidden["choices"][0]["text"] == ""
        shown = await client.ok(COMPLETIONS, ask | {"skip_special_tokens": False})
        assert shown["choices"][0]["text"] == 2 * tokenizer.token_text(special)
        ended = await client.ok(COMPLETIONS, ask | {"skip_special_tokens": False, "ignore_eos": False})
        assert ended["choices"][0]["text"] == ""
        assert ended["choices"][0]["matched_stop"] == end

    in_process(test)


def test_prompts_are_cut_and_begun_as_asked() -> None:
    async def test(client: Client) -> None:
        async def prompt(**more: Any) -> list[int]:
            body = {"prompt": [5, 6, 7, 8], "max_tokens": 1, "return_token_ids": True, **more}
            ids: list[int] = (await client.ok(COMPLETIONS, body))["choices"][0]["prompt_token_ids"]
            return ids

        assert await prompt(truncate_prompt_tokens=2) == [7, 8]
        assert await prompt(truncate_prompt_tokens=2, truncation_side="right") == [5, 6]
        assert await prompt(truncate_prompt_tokens=9) == [5, 6, 7, 8]
        assert len(await prompt(prompt=[5] * 5000, truncate_prompt_tokens=-1)) == 2047
        answer = await client.ok(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "request_id": "mine"})
        assert answer["id"] == "cmpl-mine"

    in_process(test)


def test_an_echoed_chat_begins_with_what_it_continues() -> None:
    async def test(client: Client) -> None:
        ask = {"messages": [*USER, {"role": "assistant", "content": "Well"}], "max_tokens": 3, "seed": 1, "echo": True}
        whole = (await client.ok(CHAT, ask))["choices"][0]["message"]["content"]
        assert whole.startswith("Well")
        events = [event for _, event in await client.events(CHAT, ask) if event != "[DONE]"]
        assert "".join(one["delta"].get("content", "") for event in events for one in event["choices"]) == whole

    in_process(test)


def test_every_field_says_whose_it_is_and_what_becomes_of_it() -> None:
    for name, field in engines.SHARED.items():
        assert treatment(field) in ("honoured", "inert", "refused")
        assert treatment(field) == "inert" or field.get("description"), name
    assert not engines.ALIASES.keys() & (engines.REPORTS.keys() | engines.OTHERS.keys())

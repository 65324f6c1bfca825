"""Chat completions: what is asked is given or refused, and a whole answer is the fold of its stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.harness import TEMPLATE, Client, in_process, make_llm
from unspool.ceilings import Ceilings
from unspool.errors import ModelError
from unspool.server.config import ServerConfig
from unspool.server.service import Service

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome", "days": 3}}\n</tool_call>'


def fold(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What a client makes of a stream: by choice, the content, the calls, the logprobs and the reason."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"content": "", "calls": [], "logprobs": [], "reason": None})
            choice["content"] += part["delta"].get("content") or ""
            for call in part["delta"].get("tool_calls", ()):
                if call["index"] == len(choice["calls"]):
                    choice["calls"].append({"name": call["function"]["name"], "arguments": ""})
                choice["calls"][call["index"]]["arguments"] += call["function"].get("arguments", "")
            choice["logprobs"] += (part["logprobs"] or {}).get("content", [])
            assert choice["reason"] is None, "a chunk after the end"
            choice["reason"] = part["finish_reason"]
    return choices


def as_folded(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    logprobs = (choice["logprobs"] or {}).get("content", [])
    return {
        "content": message["content"] or "",
        "calls": calls,
        "logprobs": logprobs,
        "reason": choice["finish_reason"],
    }


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 24},
        {"max_completion_tokens": 24, "n": 3, "logprobs": True, "top_logprobs": 2, "temperature": 1.3},
        {"max_tokens": 40, "stop": ["a", "I"], "ignore_eos": True},
        {"max_tokens": 24, "logit_bias": {"65": 100}},
        {"max_tokens": 80, "tools": [WEATHER], "tool_choice": "required"},
        {"max_tokens": 200, "tools": [WEATHER], "constraint": {"kind": "choice", "value": ["See.\n" + CALL]}},
        {"max_tokens": 60, "response_format": {"type": "json_object"}},
        {"max_tokens": 16, "n": 1, "best_of": 3},
        {"max_tokens": 8, "n": 2, "beam": {"width": 3}},
    ],
)
def test_whole_is_the_fold_of_the_stream(more: dict[str, Any]) -> None:
    async def test(client: Client) -> None:
        body = {"messages": USER, "seed": 7, **more}
        whole = await client.ok(PATH, body)
        events = await client.events(PATH, body | {"stream_options": {"include_usage": True}})
        assert events[-1] == (None, "[DONE]")
        chunks = [data for _, data in events[:-1]]
        folded = fold(chunks)
        assert [folded[index] for index in sorted(folded)] == [as_folded(choice) for choice in whole["choices"]]
        cached = chunks[-1]["usage"].pop("prompt_tokens_details"), whole["usage"].pop("prompt_tokens_details")
        assert all("cached_tokens" in details for details in cached)
        assert chunks[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert sum("unspool" in chunk for chunk in chunks) == 1

    in_process(test)


def test_usage_is_what_was_delivered() -> None:
    async def test(client: Client) -> None:
        body = {"messages": USER, "max_tokens": 30, "logprobs": True, "seed": 1, "stop": "z"}
        whole = await client.ok(PATH, body)
        assert whole["usage"]["completion_tokens"] == len(whole["choices"][0]["logprobs"]["content"])
        prompt = await client.ok("/tokenize", {"messages": USER})
        assert whole["usage"]["prompt_tokens"] == prompt["count"]

    in_process(test)


def test_same_seed_same_answer_and_fingerprint() -> None:
    async def test(client: Client) -> None:
        body = {"messages": USER, "max_tokens": 16, "seed": 3, "temperature": 1.5}
        first, second = await client.ok(PATH, body), await client.ok(PATH, body)
        other = await client.ok(PATH, body | {"seed": 4})
        texts = [answer["choices"][0]["message"]["content"] for answer in (first, second, other)]
        assert texts[0] == texts[1] != texts[2]
        assert first["system_fingerprint"] == second["system_fingerprint"]
        drawn = await client.ok(PATH, {"messages": USER, "max_tokens": 16, "temperature": 1.5})
        seed = drawn["unspool"]["receipt"]["seed"]
        again = await client.ok(PATH, {"messages": USER, "max_tokens": 16, "temperature": 1.5, "seed": seed})
        assert again["choices"] == drawn["choices"]

    in_process(test)


def test_responses_tell_what_they_are_made_of() -> None:
    async def test(client: Client) -> None:
        answer = await client.ok(PATH, {"messages": USER, "max_tokens": 5, "top_k": 3, "trace": True, "seed": 1})
        about = answer["unspool"]
        assert about["params"]["top_k"] == {"value": 3, "origin": "request"}
        assert about["params"]["temperature"]["origin"] == "default"
        assert set(about["timings"]) == {"queue", "prefill", "decode", "total", "first_token", "tokens_per_second"}
        assert about["utilization"] is None, "nobody has measured this machine"
        assert set(about["receipt"]) == {"model", "version", "kernels", "seed"}
        trace = answer["choices"][0]["trace"]
        assert len(trace) == 5
        assert [stage["name"] for stage in trace[0]["stages"]] == ["top_k"]

    in_process(test)


def test_responses_tell_how_near_they_came_to_the_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Ceilings("a processor", 1, "cpu-test", 1e9, 2e9, 4e9, "2026-01-02T03:04:05Z")
    monkeypatch.setattr("unspool.ceilings.ceilings", lambda *_: limits)

    async def test(client: Client) -> None:
        assert client.service.meter is not None
        client.service.meter.measure()
        answer = await client.ok(PATH, {"messages": USER, "max_tokens": 5, "temperature": 0, "ignore_eos": True})
        used, costs = answer["unspool"]["utilization"], client.service.here[0].engine.steps.costs
        assert used["weight_bytes"] == costs.weight_bytes()
        assert used["mbu"] > 0
        assert used["prefill_compute"] > 0

    in_process(test)


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"wobble": 1}, "wobble", "unknown_parameter"),
        ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
        ({"store": True}, "store", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": 1e-9}, "temperature", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"stop": ["x"] * 100}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"seed": -(2**63) - 1}, "seed", "invalid_value"),
        ({"seed": 2**64}, "seed", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "invalid_value"),
        ({"max_tokens": 5000}, "max_tokens", "context_length_exceeded"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 2100}]}, "messages", "context_length_exceeded"),
        ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
        (
            {
                "messages": [*USER, {"role": "assistant", "content": "Well"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
            "invalid_value",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"enable_thinking": True}, "enable_thinking", "unsupported_parameter"),
        ({"thinking_budget": 3}, "thinking_budget", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"top_k": 2**31}, "top_k", "invalid_value"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "prompt", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]", "invalid_value"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "invalid_value",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "invalid_value"),
        ({"beam": {"width": 2}, "trace": True}, "trace", "invalid_value"),
        ({"order": ["top_k", "nonsense"]}, "order[1]", "invalid_value"),
        ({"constraint": {"kind": "regex", "value": "("}}, "constraint", "constraint_refused"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"contains": {}}}}},
            "response_format", "constraint_refused",
        ),
        (
            {
                "tools": [WEATHER, {"type": "function", "function": {"name": "x", "parameters": {"contains": {}}}}],
                "tool_choice": "required",
            },
            "tools[1].function.parameters", "constraint_refused",
        ),
        ({"stream_options": {"chunk": 1}}, "stream_options.chunk", "unknown_parameter"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]},
                },
            },
            "tool_choice",
            "invalid_value",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(more: dict[str, Any], param: str, code: str) -> None:
    async def test(client: Client) -> None:
        error = await client.refused(PATH, {"messages": USER, **more})
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
        assert error["message"]

    in_process(test)


def test_context_overflow_is_told_in_the_words_that_clients_look_for() -> None:
    async def test(client: Client) -> None:
        for path, body, param, number in (
            ("/v1/completions", {"prompt": [65] * 2100}, "prompt", "2100"),
            (PATH, {"messages": USER, "max_tokens": 2046}, "max_tokens", "2046"),
            (PATH, {"messages": USER, "max_completion_tokens": 2046}, "max_completion_tokens", "2046"),
            ("/v1/responses", {"input": [{"role": "user", "content": "x" * 2100}]}, "input", "2125"),
        ):
            error = await client.refused(path, body)
            assert "This model's maximum context length is 2048 tokens" in error["message"]
            assert number in error["message"]
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        response = await client.post(
            "/v1/messages", {"messages": [{"role": "user", "content": "x" * 2100}], "max_tokens": 1}
        )
        assert response.status_code == 400
        assert "prompt is too long" in response.json()["error"]["message"]

    in_process(test)


def test_inert_fields_change_nothing() -> None:
    async def test(client: Client) -> None:
        body = {"messages": USER, "max_tokens": 6, "seed": 1}
        inert = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "flex", "prompt_cache_key": "k"}
        plain, marked = (
            await client.ok(PATH, body),
            await client.ok(PATH, body | inert | {"top_p": None, "tools": None}),
        )
        assert plain["choices"] == marked["choices"]

    in_process(test)


NAMED = "{% for m in messages %}<s>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}:{{ m.content }}</s>{% endfor %}"


def test_names_of_speakers_reach_the_template() -> None:
    async def test(client: Client) -> None:
        named = [{"role": "user", "content": "x", "name": "Ann"}]
        tokens = (await client.ok("/tokenize", {"messages": named}))["tokens"]
        assert (await client.ok("/detokenize", {"tokens": tokens}))["prompt"].startswith("<s>user Ann:x")
        answer = await client.ok(PATH, {"messages": named, "max_tokens": 1})
        assert answer["unspool"]["warnings"] == []

    in_process(test, llm=make_llm(NAMED))


def test_a_template_without_names_is_told_of() -> None:
    async def test(client: Client) -> None:
        named = [{"role": "user", "content": "Hello", "name": "Ann"}]
        answer = await client.ok(PATH, {"messages": named, "max_tokens": 4, "seed": 1})
        plain = await client.ok(PATH, {"messages": USER, "max_tokens": 4, "seed": 1})
        assert answer["choices"] == plain["choices"]
        assert answer["unspool"]["warnings"] == [
            "the model's chat template shows no names: messages' names have no effect"
        ]

    in_process(test)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "images are not supported"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio is not supported"),
        ({"type": "file", "file": {"file_id": "x"}}, "files are not supported"),
        ({"type": "hologram"}, 'allowed: "text"'),
    ],
)
@pytest.mark.parametrize("lenient", [False, True])
def test_parts_that_are_no_text_are_refused_by_what_they_are(part: Any, words: str, lenient: bool) -> None:
    async def test(client: Client) -> None:
        message = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}
        error = await client.refused(PATH, {"messages": [message]})
        assert error["param"] == "messages[0].content[1].type"
        assert words in error["message"]

    in_process(test, ServerConfig(lenient=lenient, log_format="off"))


def test_reasoning_in_history_reaches_the_template() -> None:
    template = "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.content }};{% endfor %}"

    async def test(client: Client) -> None:
        thought = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2", "refusal": None}
        history = [*USER, thought, {"role": "user", "content": "Sure?"}]
        tokens = (await client.ok("/tokenize", {"messages": history}))["tokens"]
        assert (await client.ok("/detokenize", {"tokens": tokens}))["prompt"] == "|Hello;2 and 2|4;|Sure?;"

    in_process(test, llm=make_llm(template))


@pytest.mark.parametrize("seed", [-1, -(2**53) - 7, -(2**63), 2**53 + 1, 2**64 - 1])
def test_any_seed_is_one_that_json_can_hold(seed: int) -> None:
    async def test(client: Client) -> None:
        body = {"messages": USER, "max_tokens": 8, "temperature": 1.5}
        answer = await client.ok(PATH, body | {"seed": seed})
        reported = answer["unspool"]["receipt"]["seed"]
        assert 0 <= reported < 2**53
        assert (await client.ok(PATH, body | {"seed": reported}))["choices"] == answer["choices"]

    in_process(test)


def test_every_seed_survives_json_and_gives_its_answer_again() -> None:
    async def test(client: Client) -> None:
        body = {"messages": USER, "max_tokens": 8, "temperature": 1.5}
        for more in ({"n": 6}, {"n": 2, "best_of": 5}, {"n": 4, "seed": 2**53 - 1}):
            answer = await client.ok(PATH, body | more)
            seeds = [about["seed"] for about in answer["unspool"]["choices"]]
            assert all(float(seed) == seed < 2**53 for seed in seeds)
            assert len(set(seeds)) == len(seeds)
            for choice, seed in zip(answer["choices"], seeds, strict=True):
                again = await client.ok(PATH, body | {"seed": seed})
                assert again["choices"][0]["message"] == choice["message"]

    in_process(test)


def test_allowed_tools_are_the_ones_that_can_be_called() -> None:
    other = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    named = [{"type": "function", "function": {"name": "weather"}}]

    async def test(client: Client) -> None:
        for mode in ("required", "auto"):
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
            body = {"messages": USER, "tools": [other, WEATHER], "tool_choice": choice, "max_tokens": 150}
            if mode == "required":
                message = (await client.ok(PATH, body | {"parallel_tool_calls": False}))["choices"][0]["message"]
                assert message["tool_calls"][0]["function"]["name"] == "weather"
            else:
                clock = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
                for text, calls in ((CALL, 1), (clock, 0)):
                    forced = {"kind": "choice", "value": [text]}
                    message = (await client.ok(PATH, body | {"constraint": forced}))["choices"][0]["message"]
                    assert len(message.get("tool_calls", ())) == calls
        # The model is shown all of them, as without the choice.
        count = (await client.ok("/tokenize", {"messages": USER, "tools": [other, WEATHER]}))["count"]
        assert (await client.ok(PATH, body | {"max_tokens": 1}))["usage"]["prompt_tokens"] == count

    in_process(test)


def test_endings_are_openais_words_and_the_report_tells_more() -> None:
    async def test(client: Client) -> None:
        forced = {"kind": "choice", "value": ["one two three"]}
        body = {"messages": USER, "max_tokens": 30, "seed": 1}
        for more, reason, stop, reported in (
            ({"constraint": forced, "stop": ["tw"]}, "stop", "tw", "stop"),
            ({"max_tokens": 2, "ignore_eos": True}, "length", None, "length"),
            ({"deadline_ms": 0.001, "ignore_eos": True}, "length", None, "deadline"),
        ):
            answer = await client.ok(PATH, body | more)
            choice = answer["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
            assert answer["unspool"]["choices"][0]["finish_reason"] == reported
            last = [data for _, data in await client.events(PATH, body | more) if data != "[DONE]"][-1]
            assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == (reason, stop)
            assert last["unspool"]["choices"][0]["finish_reason"] == reported

    in_process(test)


def test_lenient_warns_instead() -> None:
    async def test(client: Client) -> None:
        body = {
            "messages": [{"role": "user", "content": "x", "mood": "good"}],
            "max_tokens": 2,
            "wobble": 1,
            "audio": {},
        }
        warnings = (await client.ok(PATH, body))["unspool"]["warnings"]
        assert [text.split()[0] for text in warnings] == ["messages[0].mood", "wobble", "audio"]
        await client.refused(PATH, body | {"temperature": "hot"})

    in_process(test, ServerConfig(lenient=True, log_format="off"))


PLAIN = TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", "")
FORMATS = {
    "hermes": TEMPLATE,
    "llama3": PLAIN + "{# <|python_tag|> #}",
    "mistral": PLAIN + "{# [TOOL_CALLS] #}",
    "mistral, newer": PLAIN + "{# [TOOL_CALLS] [ARGS] #}",
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("choice", "count"), [("required", 1), ({"type": "function", "function": {"name": "weather"}}, 1)]
)
def test_tools_that_must_be_called_are(choice: Any, count: int, format: str) -> None:
    async def test(client: Client) -> None:
        for seed in range(4):
            body = {
                "messages": USER,
                "tools": [WEATHER],
                "tool_choice": choice,
                "seed": seed,
                "parallel_tool_calls": choice != "required",  # a named function is one call anyway
            }
            answer = await client.ok(PATH, body | {"max_tokens": 150})
            message = answer["choices"][0]["message"]
            assert message["content"] is None
            assert len(message["tool_calls"]) == count
            arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
            assert arguments["place"] in ("Rome", "Oslo")
            assert 1 <= arguments["days"] <= 9
            assert answer["choices"][0]["finish_reason"] == "tool_calls"

    in_process(test, llm=make_llm(FORMATS[format]))


@pytest.mark.parametrize("format", FORMATS)
def test_strict_tools_bind_calls_and_leave_text_free(format: str) -> None:
    async def test(client: Client) -> None:
        strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
        free = await client.ok(
            PATH, {"messages": USER, "tools": [strict], "max_tokens": 12, "seed": 1, "temperature": 2}
        )
        assert free["choices"][0]["message"]["content"]
        # The tokens of the mark forced, what follows must be a call that fits.
        answer = await client.ok(
            PATH, {"messages": USER, "tools": [strict], "tool_choice": "required", "max_tokens": 150, "seed": 2}
        )
        assert json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])

    in_process(test, llm=make_llm(FORMATS[format]))


def test_one_call_where_one_is_wanted() -> None:
    async def test(client: Client) -> None:
        two = {"kind": "choice", "value": [CALL + "\n" + CALL]}
        body = {"messages": USER, "tools": [WEATHER], "constraint": two, "max_tokens": 300}
        both = await client.ok(PATH, body)
        one = await client.ok(PATH, body | {"parallel_tool_calls": False})
        assert len(both["choices"][0]["message"]["tool_calls"]) == 2
        assert len(one["choices"][0]["message"]["tool_calls"]) == 1
        assert one["choices"][0]["finish_reason"] == "tool_calls"
        more = {"parallel_tool_calls": False, "n": 3, "temperature": 1.5, "seed": 1, "logprobs": True}
        several = await client.ok(PATH, body | more)
        assert [len(choice["message"]["tool_calls"]) for choice in several["choices"]] == [1, 1, 1]
        delivered = sum(len(choice["logprobs"]["content"]) for choice in several["choices"])
        assert several["usage"]["completion_tokens"] == delivered

    in_process(test)


def test_no_tools_where_none_are_wanted() -> None:
    async def test(client: Client) -> None:
        forced = {"kind": "choice", "value": [CALL]}
        body = {"messages": USER, "tools": [WEATHER], "tool_choice": "none", "constraint": forced, "max_tokens": 150}
        message = (await client.ok(PATH, body))["choices"][0]["message"]
        assert message["content"] == CALL
        assert "tool_calls" not in message

    in_process(test)


def test_a_template_without_tools_gets_them_told() -> None:
    async def test(client: Client) -> None:
        forced = {"kind": "choice", "value": [CALL]}
        history = [
            *USER,
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ]
        body = {"messages": history, "tools": [WEATHER], "constraint": forced, "max_tokens": 150}
        answer = await client.ok(PATH, body)
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert "no place for tools" in answer["unspool"]["warnings"][0]

    plain = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}<s>assistant:"
    checkpoint = make_llm(plain, kv_tokens=8192)
    in_process(test, llm=checkpoint)


def test_json_schema_is_obeyed() -> None:
    async def test(client: Client) -> None:
        schema = {
            "type": "object",
            "properties": {
                "colour": {"enum": ["red", "blue"]},
                "size": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["colour", "size"],
            "additionalProperties": False,
        }
        format = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
        for seed in range(3):
            body = {"messages": USER, "response_format": format, "seed": seed, "max_tokens": 100}
            value = json.loads((await client.ok(PATH, body))["choices"][0]["message"]["content"])
            assert value["colour"] in ("red", "blue")
            assert 0 <= value["size"] <= 99
        both = body | {"tools": [WEATHER]}
        message = (await client.ok(PATH, both))["choices"][0]["message"]
        assert message.get("tool_calls") or json.loads(message["content"])
        error = await client.refused(PATH, body | {"constraint": {"kind": "json_object"}})
        assert error["param"] == "constraint"

    in_process(test)


def test_a_model_without_a_template_says_so() -> None:
    async def test(client: Client) -> None:
        error = await client.refused(PATH, {"messages": USER})
        assert "no chat template" in error["message"]
        await client.ok("/v1/completions", {"prompt": "a"})

    in_process(test, llm=make_llm(None))


def test_a_template_that_raises_harms_nobody() -> None:
    async def test(client: Client) -> None:
        error = await client.refused(PATH, {"messages": [{"role": "user", "content": "bad"}]})
        assert "nothing bad" in error["message"]
        await client.ok(PATH, {"messages": USER, "max_tokens": 2})

    template = (
        "{% if messages[0].content == 'bad' %}{{ raise_exception('nothing bad') }}{% endif %}{{ messages[0].content }}"
    )
    in_process(test, llm=make_llm(template))


BOMB = "{{ ('{0:99999}' * 100000).format(1) }}"


def test_a_template_that_takes_all_memory_ends_the_start() -> None:
    with pytest.raises(ModelError, match="chat template: it was stopped: it took more than 512 MiB of memory"):
        Service(make_llm(BOMB), ServerConfig())


def test_a_template_that_takes_all_memory_later_costs_its_request_alone() -> None:
    async def test(client: Client) -> None:
        await client.refused(PATH, {"messages": [{"role": "user", "content": "bad"}]}, status=500)
        await client.ok(PATH, {"messages": USER, "max_tokens": 2})

    in_process(test, llm=make_llm(f"{{% if messages[0].content == 'bad' %}}{BOMB}{{% endif %}}hello"))

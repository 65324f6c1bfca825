"""Paths and fields of llama.cpp's server, as its documentation describes them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from tests.brake import Brake
from tests.server.harness import CONTEXT, Client, in_process, make_llm

COMPLETION = "/completion"
USER = [{"role": "user", "content": "Hello"}]


def test_a_completion_in_llamacpps_words() -> None:
    async def test(client: Client) -> None:
        ask = {"prompt": "Once", "n_predict": 6, "seed": 7, "return_tokens": True, "ignore_eos": True}
        native = await client.ok(COMPLETION, ask)
        ours = await client.ok("/v1/completions", ask)
        assert native["content"] == ours["choices"][0]["text"]
        assert native["tokens"] == ours["choices"][0]["token_ids"]
        assert (native["stop"], native["stop_type"], native["truncated"]) == (True, "limit", False)
        assert native["tokens_predicted"] == 6
        assert native["tokens_evaluated"] == ours["usage"]["prompt_tokens"]
        assert native["generation_settings"]["n_predict"] == 6
        assert native["generation_settings"]["seed"] == 7
        assert native["timings"]["predicted_n"] == 6
        assert (await client.ok("/completions", ask))["content"] == native["content"]
        assert (await client.ok(COMPLETION, {**ask, "return_tokens": False}))["tokens"] == []

    in_process(test)


def test_a_stream_ends_with_the_whole_answer_and_joins_to_it() -> None:
    async def test(client: Client) -> None:
        ask = {"prompt": "Once", "n_predict": 6, "seed": 7, "ignore_eos": True, "n_probs": 2, "return_tokens": True}
        whole = await client.ok(COMPLETION, ask)
        chunks = [data for _, data in await client.events(COMPLETION, ask)]
        assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
        assert [id for chunk in chunks for id in chunk["tokens"]] == whole["tokens"]
        reported = [one for chunk in chunks for one in chunk.get("completion_probabilities", [])]
        assert reported == whole["completion_probabilities"]
        assert chunks[-1]["tokens_predicted"] == 6

    in_process(test)


def test_how_an_answer_stopped() -> None:
    async def test(client: Client) -> None:
        ask = {"prompt": "Once", "seed": 7, "ignore_eos": True, "n_predict": 40}
        text = (await client.ok(COMPLETION, ask))["content"]
        stopped = await client.ok(COMPLETION, {**ask, "stop": [text[3]]})
        assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", text[3])
        bound = await client.ok(COMPLETION, {**ask, "grammar": 'root ::= "yes"'})
        assert (bound["content"], bound["stop_type"]) == ("yes", "eos")

    in_process(test)


@pytest.mark.parametrize(
    ("prompt", "num_answers"),
    [
        ([5, 6, 7], 1),
        ([5, "Once", 7], 1),
        ({"prompt_string": "Once"}, 1),
        (["Once", {"prompt_string": "Twice"}], 2),
        ([[5, 6], "Once", [5, "a"]], 3),
    ],
)
def test_prompts_are_texts_ids_mixtures_and_lists_of_these(prompt: Any, num_answers: int) -> None:
    async def test(client: Client) -> None:
        answer = await client.ok(COMPLETION, {"prompt": prompt, "n_predict": 2, "seed": 1, "ignore_eos": True})
        answers = answer if isinstance(answer, list) else [answer]
        assert [one["index"] for one in answers] == list(range(num_answers))
        if prompt == [5, "Once", 7]:
            once = (await client.ok("/tokenize", {"content": "Once"}))["tokens"]
            assert answers[0]["tokens_evaluated"] == 2 + len(once)

    in_process(test)


def test_probabilities_after_all_stages() -> None:
    async def test(client: Client) -> None:
        ask = {"prompt": "Once", "n_predict": 3, "seed": 1, "ignore_eos": True, "n_probs": 5, "top_k": 2}
        raw = (await client.ok(COMPLETION, ask))["completion_probabilities"]
        assert all(len(one["top_logprobs"]) == 5 and one["logprob"] < 0 for one in raw)
        final = (await client.ok(COMPLETION, {**ask, "post_sampling_probs": True}))["completion_probabilities"]
        for one in final:
            assert len(one["top_probs"]) == 2
            assert math.isclose(sum(each["prob"] for each in one["top_probs"]), 1, abs_tol=1e-5)
            assert 0 < one["prob"] <= 1

    in_process(test)


def test_biases_as_pairs_and_texts() -> None:
    async def test(client: Client) -> None:
        ask = {"prompt": "Once", "n_predict": 1, "temperature": 0, "return_tokens": True}
        best = (await client.ok(COMPLETION, ask))["tokens"][0]
        for bias in ([[best, False]], {str(best): -100}, [[best, -100.0]]):
            answer = await client.ok(COMPLETION, {**ask, "logit_bias": bias})
            assert answer["tokens"] != [best], bias
        ids = (await client.ok("/tokenize", {"content": " cat"}))["tokens"]
        answer = await client.ok(COMPLETION, {**ask, "logit_bias": [[" cat", -50]]})
        assert answer["generation_settings"]["logit_bias"] == [{"token": id, "bias": -50} for id in sorted(set(ids))]
        for wrong in ([[5, True]], [[5, "a"]], [[5, 101]], [[2.5, 1]], [[5]]):
            error = await client.refused(COMPLETION, {**ask, "logit_bias": wrong})
            assert error["param"].startswith("logit_bias")

    in_process(test)


def test_fields_of_an_answer_are_chosen() -> None:
    async def test(client: Client) -> None:
        ask = {"prompt": "Once", "n_predict": 2, "response_fields": ["content", "generation_settings/n_predict", "no"]}
        answer = await client.ok(COMPLETION, ask)
        assert set(answer) == {"content", "generation_settings/n_predict"}
        assert answer["generation_settings/n_predict"] == 2

    in_process(test)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"image_data": []}, "image_data"),
        ({"prompt": [5, [6]]}, "prompt"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["b"]}}, "prompt.multimodal_data"),
    ],
)
def test_what_a_completion_refuses(more: dict[str, Any], param: str) -> None:
    async def test(client: Client) -> None:
        assert (await client.refused(COMPLETION, {"prompt": "Once"} | more))["param"] == param

    in_process(test)


def test_a_seed_of_minus_one_is_drawn() -> None:
    async def test(client: Client) -> None:
        ask = {"prompt": "Once", "n_predict": 1, "seed": -1}
        first, second = [(await client.ok(COMPLETION, ask))["generation_settings"]["seed"] for _ in range(2)]
        assert first != second

    in_process(test)


def test_content_is_tokenized_as_llamacpp_does() -> None:
    async def test(client: Client) -> None:
        text = "a<|endoftext|>é"
        reported = await client.ok("/tokenize", {"content": text})
        assert set(reported) == {"tokens"}
        ours = await client.ok("/tokenize", {"prompt": text, "add_special_tokens": False, "parse_special": True})
        assert reported["tokens"] == ours["tokens"]
        raw = await client.ok("/tokenize", {"content": text, "parse_special": False})
        assert raw["tokens"] != reported["tokens"]
        special = await client.ok("/tokenize", {"content": text, "add_special": True, "parse_special": False})
        assert special["tokens"][-len(raw["tokens"]) :] == raw["tokens"]
        pieces = (await client.ok("/tokenize", {"content": text, "with_pieces": True}))["tokens"]
        assert [one["id"] for one in pieces] == reported["tokens"]
        parts = [one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in pieces]
        assert b"".join(parts).decode() == text
        back = await client.ok("/detokenize", {"tokens": reported["tokens"]})
        assert back["content"] == back["prompt"] == text
        assert (await client.refused("/tokenize", {"content": "a", "prompt": "a"}))["param"] == "prompt"
        assert (await client.refused("/tokenize", {"prompt": "a", "with_pieces": True}))["param"] == "with_pieces"

    in_process(test)


def test_a_conversation_is_rendered() -> None:
    async def test(client: Client) -> None:
        reported = await client.ok("/apply-template", {"messages": USER})
        ids = (await client.ok("/tokenize", {"messages": USER}))["tokens"]
        assert reported["prompt"] == (await client.ok("/detokenize", {"tokens": ids}))["prompt"]

    in_process(test)


def test_props_and_slots() -> None:
    async def test(client: Client) -> None:
        props = (await client.get("/props")).json()
        slots = (await client.get("/slots")).json()
        assert props["total_slots"] == len(slots) == client.service.llm.engine.config.max_running
        assert props["default_generation_settings"]["n_ctx"] == slots[0]["n_ctx"] == CONTEXT
        assert props["default_generation_settings"]["params"]["temperature"] == 1.0
        assert props["chat_template"].startswith("{%")
        assert not any(slot["is_processing"] for slot in slots)

    in_process(test)


def test_slots_say_when_all_are_in_use() -> None:
    async def test(client: Client) -> None:
        assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 200
        ask = {"prompt": "a", "ignore_eos": True, "n_predict": 1500}
        running = asyncio.create_task(client.ok(COMPLETION, ask))
        while not client.service.llm.engine.stats["running"]:
            await asyncio.sleep(0.001)
        assert (await client.get("/slots")).json()[0]["is_processing"]
        response = await client.get("/slots?fail_on_no_slot=1")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_slot")
        running.cancel()

    llm = make_llm(max_running=1)
    Brake(llm.engine)
    in_process(test, llm=llm)


def test_formats_with_a_schema_beside_the_type() -> None:
    async def test(client: Client) -> None:
        schema = {"const": "foo"}
        for format in (
            {"type": "json_object", "schema": schema},
            {"type": "json_schema", "schema": schema},
            {"type": "json_schema", "json_schema": {"schema": schema}},
        ):
            answer = await client.ok("/v1/chat/completions", {"messages": USER, "response_format": format})
            assert answer["choices"][0]["message"]["content"] == '"foo"'
        for wrong in ({"type": "json_schema"}, {"type": "json_schema", "schema": {}, "json_schema": {"name": "a"}}):
            error = await client.refused("/v1/chat/completions", {"messages": USER, "response_format": wrong})
            assert error["param"] == "response_format"

    in_process(test)


def test_whole_answers_have_timings() -> None:
    async def test(client: Client) -> None:
        for path, prompt in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "a"})):
            ask = {**prompt, "max_tokens": 3, "ignore_eos": True, "stream_options": {"include_usage": True}}
            whole = await client.ok(path, {name: ask[name] for name in ask if name != "stream_options"})
            assert whole["timings"]["predicted_n"] == 3
            events = [data for _, data in await client.events(path, ask) if data != "[DONE]"]
            assert ["timings" in event for event in events] == [False] * (len(events) - 2) + [True, True]

    in_process(test)

"""Forks, what-ifs, replays; steps, cache, machine, capabilities: what the inspector asks for."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.brake import Brake
from tests.server.harness import Client, in_process, make_llm
from unspool.llm import LLM
from unspool.models.random import SHAPES, random_checkpoint
from unspool.sampling.draw import gumbel
from unspool.server.config import ServerConfig
from unspool.server.pages import INSPECTOR_POLICY

ASKED: dict[str, Any] = {
    "prompt": "Once", "max_tokens": 12, "temperature": 1.2, "top_p": 0.9, "seed": 5, "ignore_eos": True, "logprobs": 2,
}  # fmt: skip


def ids_of(choice: dict[str, Any]) -> list[int]:
    return [token["id"] for token in choice["tokens"]]


def test_a_fork_goes_on_as_the_answer_did() -> None:
    async def test(client: Client) -> None:
        whole = (await client.ok("/v1/fork", ASKED))["choices"][0]
        for index in (0, 5, 11):
            forked = await client.ok("/v1/fork", {**ASKED, "output": ids_of(whole)[:index]})
            assert ids_of(forked["choices"][0]) == ids_of(whole)
            assert forked["choices"][0]["tokens"][index:] == whole["tokens"][index:]
            assert forked["choices"][0]["text"] == whole["text"]

    in_process(test)


def test_a_fork_with_another_token_begins_with_it() -> None:
    async def test(client: Client) -> None:
        whole = ids_of((await client.ok("/v1/fork", ASKED))["choices"][0])
        other = [*whole[:4], (whole[4] + 1) % 256]
        answer = await client.ok("/v1/fork", {**ASKED, "output": other, "n": 3})
        assert [ids_of(choice)[:5] for choice in answer["choices"]] == [other] * 3
        assert len({tuple(ids_of(choice)) for choice in answer["choices"]}) == 3
        assert answer["output"] == other

    in_process(test)


def test_text_may_follow_the_given_tokens() -> None:
    async def test(client: Client) -> None:
        answer = await client.ok("/v1/fork", {**ASKED, "output": [65], "output_text": "bc"})
        assert answer["output"] == [65, 98, 99]
        assert answer["choices"][0]["text"].startswith("Abc")

    in_process(test)


def test_a_conversation_forks_like_its_rendered_prompt() -> None:
    async def test(client: Client) -> None:
        params = {name: value for name, value in ASKED.items() if name != "prompt"}
        chat = await client.ok("/v1/fork", {"messages": [{"role": "user", "content": "Hi"}], **params})
        plain = await client.ok("/v1/fork", {"prompt": chat["prompt"], "is_chat": True, **params})
        assert ids_of(chat["choices"][0]) == ids_of(plain["choices"][0])
        assert chat["choices"][0]["text"] == plain["choices"][0]["text"]

    in_process(test)


def test_the_stream_of_a_fork_joins_to_the_whole() -> None:
    async def test(client: Client) -> None:
        body = {**ASKED, "n": 2, "trace": True, "output_text": "h☃"}
        whole = await client.ok("/v1/fork", body)
        events = [event for _, event in await client.events("/v1/fork", body)]
        assert events[0]["object"] == "fork.begin"
        assert events[-1] == "[DONE]"
        assert events[0]["params"] == whole["params"]
        for choice in whole["choices"]:
            mine = [one for one in events[1:-2] if one["index"] == choice["index"]]
            chunks = [one for one in mine if one["object"] == "fork.tokens"]
            assert "".join(one["text"] for one in chunks) == choice["text"]
            assert [token for one in chunks for token in one["tokens"]] == choice["tokens"]
            assert mine[-1]["object"] == "fork.end"
            assert mine[-1]["finish_reason"] == choice["finish_reason"]

    in_process(test)


def test_what_tokens_do_not_show_is_told() -> None:
    async def test(client: Client) -> None:
        end = client.service.llm.tokenizer.encode("<|endoftext|>", parse_special=True)[-1]
        snow = list("☃".encode())
        answer = await client.ok(
            "/v1/fork", {**ASKED, "output": snow, "logit_bias": {str(end): 100}, "ignore_eos": False}
        )
        tokens = answer["choices"][0]["tokens"]
        assert [(token["text"], token.get("bytes")) for token in tokens[:3]] == [
            ("", snow[:1]),
            ("", snow[1:2]),
            ("☃", snow[2:]),
        ]
        assert tokens[-1]["special"] == "<|endoftext|>"
        assert tokens[-1]["text"] == ""

    in_process(test)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ({"messages": [{"role": "user", "content": "b"}], "is_chat": True}, "is_chat"),
        ({"prompt": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"prompt": "a", "output": [999]}, "output"),
        ({"prompt": "a", "output": [65, 66], "max_tokens": 2}, "output"),
        ({"prompt": "a", "output": [65], "beam": {"width": 2}}, "output"),
        ({"prompt": "a", "trace_tokens": [999]}, "trace_tokens"),
        ({"prompt": []}, "prompt"),
    ],
)
def test_forks_that_cannot_be(body: dict[str, Any], param: str) -> None:
    async def test(client: Client) -> None:
        error = await client.refused("/v1/fork", body)
        assert error["param"] == param, error

    in_process(test)


# What if ------------------------------------------------------------------------------------------------------------
def test_a_what_if_with_the_same_parameters_gives_the_same_token_from_its_own_numbers() -> None:
    async def test(client: Client) -> None:
        whole = (await client.ok("/v1/fork", {**ASKED, "trace": True}))["choices"][0]
        same = {name: value for name, value in ASKED.items() if name not in ("max_tokens", "logprobs")}
        for index, token in enumerate(whole["tokens"]):
            step = await client.ok("/v1/whatif", {**same, "output": ids_of(whole)[:index], "trace_top": 8})
            assert step["index"] == index
            assert step["token"]["id"] == token["id"]
            assert step["trace"]["candidates"] == token["trace"]["candidates"]
            candidates = step["trace"]["candidates"]
            ids = np.array([one["token"] for one in candidates])
            noise = gumbel(5, step["trace"]["position"], ids)
            scores = np.array([one["logit"] for one in candidates], np.float32) + noise
            assert int(ids[np.argmax(scores)]) == token["id"]

    in_process(test)


def test_a_what_if_follows_the_tokens_that_it_is_asked_about() -> None:
    async def test(client: Client) -> None:
        body = {"prompt": "Once", "seed": 1, "top_k": 2, "trace_top": 3, "trace_tokens": [7, 7, 9]}
        trace = (await client.ok("/v1/whatif", body))["trace"]
        ids = [id for id, _ in trace["alternatives"]]
        assert len(ids) == len(set(ids))
        assert ids[-2:] == [7, 9]
        [stage] = trace["stages"]
        assert stage["name"] == "top_k"
        assert stage["survivors"] == 2
        assert [effect["after"] for effect in stage["tokens"] if effect["token"] in (7, 9)] == [None, None]
        assert set(trace["texts"]) >= {str(id) for id in ids}

    in_process(test)


def test_a_what_if_answers_though_the_request_would_stop_there() -> None:
    async def test(client: Client) -> None:
        step = await client.ok("/v1/whatif", {"prompt": "a", "output_text": "abc", "stop": ["abc"], "seed": 1})
        assert step["index"] == 3
        error = await client.refused("/v1/whatif", {"prompt": "a", "n": 2})
        assert error["param"] == "n"

    in_process(test)


def test_traces_are_wanted_before_their_size_is() -> None:
    async def test(client: Client) -> None:
        answer = await client.ok("/v1/completions", {"prompt": "a", "trace_top": 3})
        assert "trace_top does nothing without trace" in answer["unspool"]["warnings"]

    in_process(test)


# Again --------------------------------------------------------------------------------------------------------------
def test_a_replay_has_the_same_bits_in_any_crowd() -> None:
    async def test(client: Client) -> None:
        whole = (await client.ok("/v1/fork", ASKED))["choices"][0]
        for crowd in (0, 3, 16):
            again = await client.ok("/v1/replay", {**ASKED, "crowd": crowd})
            assert again["crowd"] == crowd
            assert 0 <= again["place"] <= crowd
            assert again["choices"][0]["tokens"] == whole["tokens"]
        steps = (await client.get("/v1/engine/steps")).json()["steps"]
        assert max(len(step["works"]) for step in steps) > 8

    in_process(test)


def test_a_replay_without_a_seed_is_refused() -> None:
    async def test(client: Client) -> None:
        error = await client.refused("/v1/replay", {"prompt": "a"})
        assert error["param"] == "seed"
        await client.ok("/v1/replay", {"prompt": "a", "temperature": 0, "max_tokens": 2, "crowd": 1})

    in_process(test)


# The engine ---------------------------------------------------------------------------------------------------------
def test_steps_add_up_to_what_was_computed() -> None:
    async def test(client: Client) -> None:
        answer = await client.ok("/v1/fork", {**ASKED, "n": 2})
        reported = (await client.get("/v1/engine/steps")).json()
        first = answer["number"]
        mine = [work for step in reported["steps"] for work in step["works"] if work["request"] in (first, first + 1)]
        num_prompt = len(answer["prompt"])
        assert sum(work["tokens"] for work in mine if work["request"] == first) == num_prompt + 11
        assert [step["number"] for step in reported["steps"]] == list(range(len(reported["steps"])))
        later = (await client.get(f"/v1/engine/steps?since={reported['steps'][-3]['number']}")).json()
        assert len(later["steps"]) == 2
        assert (await client.get("/v1/engine/steps?since=x")).status_code == 400

    in_process(test)


def test_neither_steps_nor_cache_show_a_token() -> None:
    """The prompt's ids are large and rare numbers; none of them is anywhere in what is told."""

    async def test(client: Client) -> None:
        secret = [297, 301, 307, 311, 313, 317] * 12
        await client.ok("/v1/fork", {**ASKED, "prompt": secret})
        steps = (await client.get("/v1/engine/steps")).json()["steps"]
        counts = {"prompt_rows", "decode_rows", "weight_bytes", "cache_bytes", "num_bytes", "flops"}
        allowed = {"number", "start", "seconds", "is_ahead", "works", "waiting", "blocks_free", *counts}
        assert all(set(step) == allowed for step in steps)
        assert all(set(work) == {"request", "start", "tokens", "samples"} for step in steps for work in step["works"])
        assert all(isinstance(value, int) for step in steps for work in step["works"] for value in work.values())
        cache = (await client.get("/v1/engine/cache")).text
        assert not any(str(id) in cache for id in (297, 301, 307, 311, 313, 317))

    in_process(test)


def test_the_cache_map_tells_counts_of_a_running_request_and_none_of_its_tokens() -> None:
    llm = make_llm()
    brake = Brake(llm.engine)

    async def test(client: Client) -> None:
        secret = [297, 301, 307, 311, 313, 317] * 12
        asked = asyncio.create_task(client.ok("/v1/fork", {**ASKED, "prompt": secret, "max_tokens": 1500}))
        while not (reported := (await client.get("/v1/engine/cache")).json())["requests"]:
            await asyncio.sleep(0.005)
        [request] = reported["requests"]
        number = request.pop("number")
        assert request.pop("state") in ("running", "waiting")
        counts = {"prompt_tokens", "tokens", "computed", "cached", "blocks", "states"}
        assert set(request) == counts
        assert request["prompt_tokens"] == len(secret)
        assert all(isinstance(value, int) for name, value in request.items() if name not in ("blocks", "states"))
        assert max(request["blocks"], default=0) < reported["num_blocks"]
        brake.release()
        assert (await asked)["number"] == number

    in_process(test, llm=llm)


def test_the_cache_map_accounts_for_every_state_of_recurrent_layers() -> None:
    shape = dataclasses.replace(SHAPES["tiny-qwen3.5"], context_length=512)
    checkpoint = dataclasses.replace(random_checkpoint(shape), eos_ids=())
    llm = LLM(checkpoint, device="cpu", threads=1, kv_tokens=2048)
    brake = Brake(llm.engine)

    async def test(client: Client) -> None:
        before = (await client.get("/v1/engine/cache")).json()["states"]
        assert before["counts"] == {"free": before["num_slots"], "held": 0, "snapshot": 0}
        assert before["bytes"] > 0
        asked = asyncio.create_task(client.ok("/v1/fork", {**ASKED, "prompt": list(range(100)), "max_tokens": 300}))
        while not (reported := (await client.get("/v1/engine/cache")).json())["requests"]:
            await asyncio.sleep(0.005)
        [request] = reported["requests"]
        held = [index for index, use in enumerate(_unrolled(reported["states"]["map"])) if use == "held"]
        assert sorted(request["states"]) == held
        brake.release()
        await asked
        after = (await client.get("/v1/engine/cache")).json()["states"]
        assert after["counts"]["held"] == 0
        assert after["counts"]["snapshot"] >= 2, "of the prompt and of the whole"
        assert sum(count for _, count in after["map"]) == after["num_slots"] == sum(after["counts"].values())

    in_process(test, llm=llm)


def _unrolled(runs: list[list[Any]]) -> list[str]:
    return [use for use, count in runs for _ in range(count)]


def test_the_cache_map_accounts_for_every_block() -> None:
    async def test(client: Client) -> None:
        await client.ok("/v1/fork", {**ASKED, "prompt": list(range(100))})
        reported = (await client.get("/v1/engine/cache")).json()
        assert sum(count for _, count in reported["map"]) == reported["num_blocks"] == sum(reported["counts"].values())
        assert reported["counts"]["cached"] == 100 // reported["block_size"]
        for state, count in reported["counts"].items():
            assert count == sum(length for name, length in reported["map"] if name == state)
        assert reported["requests"] == []
        assert reported["states"] is None

    in_process(test)


def test_capabilities_name_every_parameter_and_its_value() -> None:
    async def test(client: Client) -> None:
        reported = (await client.get("/v1/capabilities")).json()
        by_name = {one["name"]: one for one in reported["parameters"]}
        assert by_name["temperature"]["value"] == 1.0
        assert by_name["temperature"]["origin"] == "default"
        assert by_name["top_p"]["schema"]["maximum"] == 1
        assert reported["receipt"]["kernels"] == client.service.llm.receipt(0).kernels
        assert reported["has_template"]
        machine = (await client.get("/v1/machine")).json()
        assert machine["cores"] >= 1
        assert machine["weights_bytes"] > 0

    in_process(test)


# The page -----------------------------------------------------------------------------------------------------------
def test_the_page_needs_no_key_and_everything_it_asks_for_does() -> None:
    async def test(client: Client) -> None:
        page = await client.get("/")
        assert page.status_code in (200, 503)  # with and without built assets
        assert page.headers["content-security-policy"] == INSPECTOR_POLICY
        assert (await client.get("/assets/none.js")).status_code == 404
        assert (await client.get("/assets/..%2f__init__.py")).status_code == 404
        for path in ("/v1/capabilities", "/v1/engine/steps", "/v1/engine/cache", "/v1/machine", "/docs"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"authorization": "Bearer k"})).status_code == 200
        assert (await client.post("/v1/fork", ASKED)).status_code == 401

    in_process(test, ServerConfig(api_keys=("k",), log_format="off"), make_llm())


def test_the_documents_page_runs_its_own_script_alone() -> None:
    async def test(client: Client) -> None:
        policy = (await client.get("/docs")).headers["content-security-policy"]
        assert "unsafe-inline" not in policy
        assert policy.count("'sha256-") == 2

    in_process(test)


def test_text_that_may_become_a_stop_is_told_as_held() -> None:
    async def test(client: Client) -> None:
        text = (await client.ok("/v1/fork", ASKED))["choices"][0]["text"]
        stop = text[3:7] + " never comes"
        body = {**ASKED, "stop": [stop], "trace": True}
        chunks = [event for _, event in await client.events("/v1/fork", body) if event != "[DONE]"]
        chunks = [one for one in chunks if one["object"] == "fork.tokens"]
        shown, held = "", []
        for one in chunks:
            shown += one["text"]
            held.append(one.get("held", ""))
            assert text.startswith(shown + held[-1])
            assert stop.startswith(held[-1])
        assert shown == text
        assert text[3:7] in held
        assert held[-1] == ""
        quiet = [event for _, event in await client.events("/v1/fork", {**body, "trace": False})]
        assert not any("held" in one for one in quiet if one != "[DONE]")

    in_process(test)

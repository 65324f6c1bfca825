"""Bodies that nobody would write: no answer is a 5xx, every refusal has its shape, the engine stays whole."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.harness import Client, Live, in_process, make_llm
from unspool.server.endpoints import BATCHED
from unspool.server.kinds import Schema
from unspool.server.openapi import document

ODD: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**64, -(2**63), 1e308, -0.0, 0.5, "", "a", "\0", "\ud800", "𝄞",
                  "<|endoftext|>", [], [[]], [None], {}, {"": {}}, "x" * 5000, [0] * 3000]  # fmt: skip


def value_for(rng: random.Random, schema: Schema, depth: int = 0) -> Any:
    """A value that the schema takes, mostly."""
    if rng.random() < 0.04 or depth > 6:
        return rng.choice(ODD)
    if "anyOf" in schema:
        return value_for(rng, rng.choice(schema["anyOf"]), depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kinds = schema.get("type", "string")
    kind = rng.choice(kinds) if isinstance(kinds, list) else kinds
    if kind == "string":
        least = schema.get("minLength", 0)
        return "".join(rng.choice(string.printable + "é☃") for _ in range(max(least, rng.randrange(12))))
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", -3))
        high = min(schema.get("maximum", low + 40), low + 40)
        return rng.randint(int(low), int(high)) if kind == "integer" else rng.uniform(low, high)
    if kind == "array":
        count = rng.randrange(schema.get("minItems", 0), 4)
        return [value_for(rng, schema.get("items", {}), depth + 1) for _ in range(count)]
    if kind == "object":
        return object_for(rng, schema, depth)
    return rng.random() < 0.5 if kind == "boolean" else None


def object_for(rng: random.Random, schema: Schema, depth: int, share: float = 0.25) -> dict[str, Any]:
    value = {}
    for name, field in schema.get("properties", {}).items():
        if name in schema.get("required", ()) or rng.random() < (share if depth else share / 2):
            value[name] = value_for(rng, field, depth + 1)
    if isinstance(schema.get("additionalProperties"), dict):
        value[str(rng.randrange(300))] = value_for(rng, schema["additionalProperties"], depth + 1)
    if rng.random() < 0.03:
        value[rng.choice(["extra", "", "__proto__", "x" * 300])] = rng.choice(ODD)
    return value


def body_for(rng: random.Random, schema: Schema) -> dict[str, Any]:
    body = object_for(rng, schema, 0)
    body.pop("model", None)
    if {"prompt", "messages"} <= schema["properties"].keys() and rng.random() < 0.8:  # one of the two is needed
        body.pop("messages", None)
        body["prompt"] = value_for(rng, schema["properties"]["prompt"])
    if "crowd" in schema["properties"]:
        body |= {"seed": rng.randrange(9), "crowd": rng.randrange(4)}
    for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
        if name in schema["properties"] and rng.random() < 0.9:
            body[name] = rng.randrange(6)
            break
    return body


@pytest.mark.parametrize("path", BATCHED)
def test_random_bodies(path: str) -> None:
    schema = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]

    async def test(client: Client) -> None:
        rng = random.Random(path)
        statuses: dict[int, int] = {}
        for count in range(2000):
            if count >= 400 and statuses.get(200, 0) > 10:
                break  # most random bodies are refused
            body = body_for(rng, schema)
            data = json.dumps(body)
            if rng.random() < 0.05:
                cut = rng.randrange(len(data))
                data = data[:cut] + rng.choice(["", "}", "\x00", '"']) + data[cut + 1 :]
            answer = await client.http.post(path, content=data, headers={"content-type": "application/json"})
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404), f"{answer.status_code} {answer.text}\n{data}"
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]
            else:
                assert answer.content
        if path != "/v1/embeddings":
            assert statuses.get(200, 0) > 10, statuses

    in_process(test, llm=make_llm(max_waiting=10_000))


@pytest.mark.slow
def test_schemathesis_finds_no_5xx(make_server: Callable[..., Live]) -> None:
    """The published document, explored by a tool that did not write it."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error

    server = make_server(make_llm(max_waiting=10_000))
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for result in api.get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=120,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        def explore(case: Any) -> None:
            if isinstance(case.body, dict):  # answers may be long; the fields are what is explored
                for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
                    if isinstance(case.body.get(name), int):
                        case.body[name] %= 8
                case.body.setdefault("deadline_ms", 200)
            case.call_and_validate(checks=[not_a_server_error])

        explore()
    server.wait_idle()

"""The tables: one that checks is one that is published, and agrees with what the engine takes."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Client, in_process
from unspool.errors import RequestError
from unspool.params import SamplingParams
from unspool.params.registry import BY_NAME
from unspool.server import fields, schema
from unspool.server.endpoints import ENDPOINTS
from unspool.server.fieldtable import tables
from unspool.server.kinds import Checker, Schema, published
from unspool.server.openapi import document

BODIES = {
    name: value
    for name, value in vars(schema).items()
    if name.isupper() and isinstance(value, dict) and "type" in value
}


def test_every_sampling_parameter_is_a_field() -> None:
    params = {field.name for field in dataclasses.fields(SamplingParams) if not BY_NAME[field.name].is_local}
    for body, renamed in {
        "CHAT": {"logprobs", "prompt_logprobs"},
        "COMPLETIONS": set(),
        "RESPONSES": {"logprobs", "prompt_logprobs", "max_tokens", "n", "best_of", "beam"},
        "MESSAGES": {"logprobs", "prompt_logprobs", "stop", "n", "best_of", "beam"},
    }.items():
        assert params - set(BODIES[body]["properties"]) <= renamed, body


@pytest.mark.parametrize(
    "name", sorted(name for name, field in fields.SAMPLING.items() if field.get("type") in ("integer", "number"))
)
def test_bounds_agree_with_the_engines(name: str) -> None:
    """What a table takes at its edges, SamplingParams takes; what lies just beyond, neither."""
    field = fields.SAMPLING[name]
    step = 1 if field["type"] == "integer" else 1e-3
    low, high, above = field.get("minimum"), field.get("maximum"), field.get("exclusiveMinimum")
    if name == "seed":  # whatever the engine does not take is mapped into its range
        low = high = None
    if low is not None and name not in ("penalty_window", "dry_window"):  # 0 means nothing there; the engine says so
        SamplingParams(**{name: low})
    if high is not None:
        if name == "best_of":
            SamplingParams(best_of=high)
        else:
            SamplingParams(**{name: high})
    for beyond in ([low - step] if low is not None else []) + ([above] if above is not None else []):
        with pytest.raises(RequestError):
            SamplingParams(**{name: beyond})
        with pytest.raises(RequestError):
            Checker().check(field, beyond, name)
    if high is not None:
        with pytest.raises(RequestError):
            Checker().check(field, high + step, name)


def test_every_route_is_published_with_its_own_table() -> None:
    paths = document()["paths"]
    for path, endpoint in ENDPOINTS.items():
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"] == published(endpoint.schema)
    assert {path for path, methods in paths.items() if "post" in methods} == set(ENDPOINTS)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_examples_are_taken(path: str) -> None:
    Checker().check(ENDPOINTS[path].schema, copy.deepcopy(ENDPOINTS[path].example))


def _parts(node: Any) -> Iterator[Schema]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _parts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _parts(value)


def test_nothing_of_ours_is_published() -> None:
    for part in _parts(document()):
        assert not any(key.startswith("x-t") for key in part)


def test_an_unknown_word_in_a_table_is_noticed() -> None:
    with pytest.raises(ValueError, match="pattern"):
        published({"type": "string", "pattern": "a+"})


@pytest.mark.parametrize(
    ("table", "value", "path", "words"),
    [
        ({"type": "integer"}, True, "x", "expected an integer"),
        ({"type": "integer"}, 1.5, "x", "expected an integer"),
        ({"type": "number", "minimum": 0}, -1, "x", "x is -1; allowed: from 0 up"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, 0, "x", "allowed: above 0 to 1"),
        ({"const": False}, 0, "x", "only false is supported"),
        ({"type": "string", "enum": ["a", "b"]}, "c", "x", '"c"; allowed: "a", "b"'),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [1, 2, 3], "x", "3 entries; at most 2"),
        ({"type": "array", "items": {"type": "integer"}}, [1, "a"], "x[1]", "expected an integer"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, ["a", 2], "x[1]", "a string"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, 2, "x", "expected a string or an array"),
    ],
)  # fmt: skip
def test_errors_name_the_place_and_the_range(table: Schema, value: Any, path: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        Checker().check(table, value, "x")
    assert refused.value.param == path
    assert words in str(refused.value)


def test_the_document_is_served() -> None:
    async def test(client: Client) -> None:
        assert (await client.get("/openapi.json")).json() == document()

    in_process(test)


def test_the_docs_have_the_tables() -> None:
    """docs/server.md holds what `python -m unspool.server.fieldtable` prints."""
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
    found = re.search(r"<!-- fields -->\n(.*?)<!-- /fields -->", text, re.DOTALL)
    assert found is not None
    assert found[1] == tables()


@pytest.mark.slow  # not that it is: it fails when a client learns a new word, which is no change of ours
def test_every_field_of_the_clients_is_in_a_table() -> None:
    """Nothing that OpenAI's or Anthropic's own client can send is unknown: it is honoured or refused by name."""
    from anthropic.types import message_count_tokens_params, message_create_params
    from openai.types import completion_create_params as completions
    from openai.types import embedding_create_params as embeddings
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    for kind, table in (
        (chat.CompletionCreateParamsBase, schema.CHAT),
        (completions.CompletionCreateParamsBase, schema.COMPLETIONS),
        (responses.ResponseCreateParamsBase, schema.RESPONSES),
        (embeddings.EmbeddingCreateParams, schema.EMBEDDINGS),
        (message_create_params.MessageCreateParamsBase, schema.MESSAGES),
        (message_count_tokens_params.MessageCountTokensParams, schema.COUNT_TOKENS),
    ):
        unknown = set(kind.__annotations__) - set(table["properties"])
        assert not unknown, f"{kind.__name__}: {sorted(unknown)}"

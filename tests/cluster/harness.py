"""What tests of replicas share: a small model as a file, requests of every kind, and when two answers are equal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.server.harness import TEMPLATE, parse_events
from unspool.cluster import wire
from unspool.cluster.replica import Replica
from unspool.errors import QueueFullError, ReplicaLostError
from unspool.events import FinishReason
from unspool.models.random import SHAPES, byte_vocabulary, random_checkpoint
from unspool.models.registry import metadata_of, tensors_of
from unspool.weights.gguf_writer import write_gguf


def write_model(path: Path, seed: int = 0, context: int = 2048) -> Path:
    """A tiny model of random weights with a chat template, as a file."""
    config = dataclasses.replace(SHAPES["tiny"], context_length=context)
    checkpoint = random_checkpoint(config, seed=seed)
    words = byte_vocabulary(config.vocab_size) | {"tokenizer.chat_template": TEMPLATE}
    write_gguf(path, metadata_of(config) | words, {**checkpoint.weights, **tensors_of(config)})
    return path


# Replicas of this process --------------------------------------------------------------------------------------------
@dataclass
class Fake:
    """A replica of this process: after `dies_after` events of a stream it is lost; `change` is what becomes of its
    messages."""

    name: str
    replica: Replica
    dies_after: list[int] = field(default_factory=list)  # of one stream after the other; then it lives on
    change: Callable[[wire.Message], wire.Message] = lambda message: message
    is_full: bool = False
    is_hung: bool = False
    num_requests: int = 0
    num_reports: int = 1


class FakeStream:
    def __init__(self, fake: Fake, data: bytes) -> None:
        self.replica, self._fake = fake.name, fake
        self._request = wire.load(data)
        self._messages = fake.replica.stream(data)
        self._ready: list[wire.Message] = []
        self._left = fake.dies_after.pop(0) if fake.dies_after else None

    def __aiter__(self) -> AsyncIterator[wire.Message]:
        return self

    async def __anext__(self) -> wire.Message:
        if self._left == 0 or self._fake.is_hung:
            raise ReplicaLostError(f"{self.replica} died")
        if self._left is not None:
            self._left -= 1
        if self._fake.is_full:
            return wire.Refused(QueueFullError("full"))
        while not self._ready:
            message = wire.load(await anext(self._messages))
            if isinstance(message, wire.Events):  # one by one, however many came together
                self._ready += [wire.Events((event,), message.utilization) for event in message.events]
            else:
                self._ready.append(message)
        return self._fake.change(self._ready.pop(0))

    async def abort(self, reason: FinishReason) -> None:
        self._fake.replica.abort(self._request.id, reason)

    async def close(self) -> None:
        await self._messages.aclose()  # type: ignore[attr-defined]


class FakeTransport:
    """Takes the first replica that is not to be avoided."""

    def __init__(self, fakes: Sequence[Fake]) -> None:
        self.fakes = fakes
        self.known: dict[str, wire.Status] = {}
        self.has_another_model = False

    async def start(self, source: str) -> wire.Status:
        self.known = {fake.name: await fake.replica.status() for fake in self.fakes}
        return next(iter(self.known.values()))

    async def open(self, request: bytes, chain: Sequence[str], avoid: Collection[str]) -> FakeStream:
        for fake in self.fakes:
            if fake.name not in avoid:
                fake.num_requests += 1
                return FakeStream(fake, request)
        raise ReplicaLostError("no replica can take the request now")

    async def page(self, replica: str, asked: wire.PageRequest) -> wire.PageAnswer:
        return await next(fake for fake in self.fakes if fake.name == replica).replica.page(asked)

    def reports(self) -> dict[str, int]:
        return {fake.name: fake.num_reports for fake in self.fakes}

    def statuses(self) -> dict[str, wire.Status]:
        return self.known

    async def is_replaced(self) -> bool:
        return self.has_another_model

    async def close(self) -> None: ...


# Requests of every kind ----------------------------------------------------------------------------------------------
USER = [{"role": "user", "content": "Which way to Rome?"}]
WAY = {
    "name": "way",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["place", "days"],
    },
}
TOOL = {"type": "function", "function": WAY}
DRAW = {"temperature": 1.1, "seed": 11}
LONG = DRAW | {"ignore_eos": True}
Asked = tuple[str, dict[str, Any]]

ANSWERS: dict[str, Asked] = {
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 40} | LONG),
    "chat, greedy": ("/v1/chat/completions", {"messages": USER, "max_tokens": 40, "temperature": 0, "seed": 1}),
    "chat, n and logprobs": (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 24, "n": 3, "logprobs": True, "top_logprobs": 2} | LONG,
    ),
    "chat, tool call": (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 120, "tools": [TOOL], "tool_choice": "required"} | DRAW,
    ),
    "chat, schema": (
        "/v1/chat/completions",
        {
            "messages": USER,
            "max_tokens": 120,
            "response_format": {"type": "json_schema", "json_schema": {"name": "way", "schema": WAY["parameters"]}},
        }
        | DRAW,
    ),
    "completion": ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 60} | LONG),
    "completion, prompts": ("/v1/completions", {"prompt": ["One", "Two", [70, 71]], "n": 2, "max_tokens": 12} | LONG),
    "completion, trace": ("/v1/completions", {"prompt": "Once", "max_tokens": 8, "trace": True, "top_k": 9} | LONG),
    "completion, stop": (
        "/v1/completions",
        {"prompt": "Once", "max_tokens": 200, "stop": ["q:", "zz"], "trace": True} | LONG,
    ),
    "responses": ("/v1/responses", {"input": "Which way?", "max_output_tokens": 30} | LONG),
    "responses, tool call": (
        "/v1/responses",
        {"input": "Which way?", "max_output_tokens": 120, "tools": [{"type": "function"} | WAY]}
        | {"tool_choice": "required"}
        | DRAW,
    ),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 30} | LONG),
    "messages, tool call": (
        "/v1/messages",
        {
            "messages": USER,
            "max_tokens": 120,
            "tools": [{"name": "way", "input_schema": WAY["parameters"]}],
            "tool_choice": {"type": "any"},
        }
        | DRAW,
    ),
    "fork": (
        "/v1/fork",
        {"prompt": "Once upon", "output": [70, 71, 72], "max_tokens": 20, "logprobs": 2, "n": 2} | LONG,
    ),
}
WHOLE: dict[str, Asked] = {  # that do not stream
    "score": ("/v1/score", {"input": ["The sea is blue.", "Rome"], "top_logprobs": 2}),
    "whatif": ("/v1/whatif", {"prompt": "Once", "output": [70, 71], "trace_top": 4} | DRAW),
    "replay": ("/v1/replay", {"prompt": "Once", "max_tokens": 8, "logprobs": 0, "crowd": 3} | DRAW),
    "beam": ("/v1/completions", {"prompt": "Once", "max_tokens": 8, "use_beam_search": True, "n": 2, "seed": 1}),
    "tokenize": ("/tokenize", {"messages": USER}),
    "detokenize": ("/detokenize", {"tokens": [70, 71]}),
    "count tokens": ("/v1/messages/count_tokens", {"messages": USER}),
}
REFUSED: dict[str, Asked] = {
    "a field's value": ("/v1/completions", {"prompt": "x", "top_p": 2}),
    "a field's name": ("/v1/chat/completions", {"messages": USER, "top_q": 2}),
    "a missing field": ("/v1/chat/completions", {}),
    "a model": ("/v1/completions", {"prompt": "x", "model": "other"}),
    "a length": ("/v1/completions", {"prompt": "x", "max_tokens": 5000}),
    "a long prompt": ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 3000}], "max_tokens": 5}),
    "a token": ("/v1/completions", {"prompt": [100_000], "max_tokens": 5}),
    "a schema": (
        "/v1/chat/completions",
        {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"contains": {}}}},
        },
    ),
    "a grammar": ("/v1/completions", {"prompt": "x", "constraint": {"kind": "grammar", "value": "start: ("}}),
    "embeddings": ("/v1/embeddings", {"input": "x"}),
    "a seed": ("/v1/replay", {"prompt": "x", "max_tokens": 4}),
}
# What two runs may tell differently: names that were drawn, times and shares of ceilings that one process has measured,
# and what happened to be computed already.
DIFFERENT = {
    "id", "created", "created_at", "completed_at", "timings", "utilization", "request_id", "item_id", "call_id",
    "response_id",
    "cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens", "place", "number",
    "prompt_tokens_details", "input_tokens_details", "usage", "obfuscation",
}  # fmt: skip


def same(value: Any) -> Any:
    """Of an answer, what every run of its request must tell."""
    if isinstance(value, dict):
        if value.get("object") == "list" and "unspool" in value:  # a score, whose seed cannot be given and does nothing
            value = {key: each for key, each in value.items() if key != "unspool"}
        return {key: same(each) for key, each in value.items() if key not in DIFFERENT}
    if isinstance(value, list):
        return [same(each) for each in value]
    return value


def folded(data: bytes) -> dict[str, Any]:
    """Of a stream, what every run of its request must tell: how it is cut into events is not part of it."""
    texts: dict[str, str] = {}
    others: list[Any] = []
    for name, event in parse_events(data):
        if isinstance(event, dict):
            _fold(event, (name or "",), texts, others)
    return {"texts": texts, "others": sorted(others)}


def _fold(value: Any, path: tuple[str, ...], texts: dict[str, str], others: list[str]) -> None:
    """Texts of deltas are joined by where they are, numbers and names of ends are kept."""
    index = value.get("index", value.get("output_index", 0))
    for key, each in value.items():
        if key in DIFFERENT | {"index", "output_index", "content_index", "sequence_number", "type", "object", "model"}:
            continue
        where = (*path, str(index), key)
        if isinstance(each, dict):
            _fold(each, where, texts, others)
        elif isinstance(each, list) and each and isinstance(each[0], dict):
            for one in each:
                _fold(one, where, texts, others)
        elif isinstance(each, str):
            texts["/".join(where)] = texts.get("/".join(where), "") + each
        elif each is not None and each != []:
            others.append(json.dumps([*where, each], sort_keys=True))

"""Requests, events and errors as JSON, so that processes exchange values and never pickled objects.

A record (a dataclass or a named tuple) is an object with its class name under "~" and the fields that differ from their
defaults; a mapping is a list of pairs, because its keys need not be strings; a tuple is an array. JSON keeps Python's
floats exactly, so logprobs arrive with the same bits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from unspool import errors, events
from unspool.ceilings import Utilization
from unspool.cluster.prefixes import split_keys
from unspool.errors import EngineError, RequestError, UnspoolError
from unspool.events import Event, Failed, Text, Token
from unspool.params import BeamParams, Constraint, RepetitionDetector, SamplingParams, ThinkingMarks
from unspool.results import Receipt

KIND = "~"


@dataclass(frozen=True)
class WireRequest:
    """What a replica is asked to generate."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    output: tuple[int, ...] = ()  # how the answer begins
    is_chat: bool = False
    traceparent: str | None = None  # of the request's span
    source: str | None = None  # the model whose tokenizer the prompt went through: see Status


@dataclass(frozen=True)
class Accepted:
    """The first message of a stream: the replica has queued the request."""

    receipt: Receipt


@dataclass(frozen=True)
class Refused:
    """The first and only message: the request is wrong, or there is no room for it."""

    error: Exception


@dataclass(frozen=True)
class Events:
    """What a replica generated since its last message. Without events it says that the replica is alive.

    With the ending of the first choice: how near it came to the ceilings of the replica's machine, if they are known.
    """

    events: tuple[Event, ...] = ()
    utilization: Utilization | None = None


@dataclass(frozen=True)
class PageRequest:
    """A page of a replica's engine: /v1/engine/cache and the like."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PageAnswer:
    status: int
    media_type: str
    body: str


@dataclass(frozen=True)
class Status:
    """What a replica reports to routers and metrics about itself."""

    receipt: Receipt
    source: str  # the fingerprint of the model's files; the receipt has that of the weights, which may be quantized
    context_length: int
    block_size: int
    layout: str  # of the KV cache: part of its block keys
    stats: Mapping[str, float] = field(default_factory=dict)
    prefixes: str = ""  # short keys of computed blocks, joined: see prefixes

    @cached_property
    def held(self) -> frozenset[str]:
        """The keys of computed blocks."""
        return frozenset(split_keys(self.prefixes))


Message = Accepted | Refused | Events


def dump(value: Any) -> bytes:
    return json.dumps(_plain(value), ensure_ascii=True, separators=(",", ":")).encode()


def load(data: bytes) -> Any:
    """The value that `dump` wrote. Data of another shape raises an EngineError."""
    try:
        return _value(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EngineError(f"a message of another process cannot be read: {type(error).__name__}: {error}") from error


# Values ---------------------------------------------------------------------------------------------------------------
def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Exception):
        return _plain_error(value)
    if isinstance(value, tuple) and type(value) is Token and value[1:] == (None, (), None, None):
        return {KIND: "t", "i": value.id}  # nearly every token of a stream
    name = type(value).__name__
    if kinds().get(name) is type(value):
        return {KIND: name, **{key: _plain(each) for key, each in _fields(value).items()}}
    if isinstance(value, Mapping):
        return {KIND: "map", "items": [[_plain(key), _plain(each)] for key, each in value.items()]}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Sequence):
        return {KIND: "list", "items": [_plain(each) for each in value]}
    raise EngineError(f"{name} cannot be sent to another process")


def _fields(record: Any) -> dict[str, Any]:
    if isinstance(record, tuple):
        defaults = record._field_defaults  # type: ignore[attr-defined]
        values = record._asdict()  # type: ignore[attr-defined]
        return {name: each for name, each in values.items() if name not in defaults or each != defaults[name]}
    return {
        each.name: getattr(record, each.name)
        for each in dataclasses.fields(record)
        if each.init and not _is_default(getattr(record, each.name), each)
    }


def _is_default(value: Any, spec: dataclasses.Field[Any]) -> bool:
    if spec.default_factory is not dataclasses.MISSING:
        return bool(value == spec.default_factory())
    return spec.default is not dataclasses.MISSING and value is spec.default


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_value(each) for each in plain)
    if not isinstance(plain, dict):
        return plain
    kind = plain.pop(KIND)
    if kind == "t":
        return events.bare_token(plain["i"])
    if kind == "map":
        return {_value(key): _value(each) for key, each in plain["items"]}
    if kind == "list":
        return [_value(each) for each in plain["items"]]
    if kind == "error":
        return _error(plain)
    if kind == "defect":
        return _defect(plain["name"], plain["message"])
    return kinds()[kind](**{name: _value(each) for name, each in plain.items()})


_KINDS: dict[str, type] = {}


def kinds() -> Mapping[str, type]:
    """The records that may be sent. Traces import numpy, so they are looked up when the first message is made."""
    if not _KINDS:
        from unspool.sampling import trace

        known = (
            WireRequest, Accepted, Refused, Events, Status, PageRequest, PageAnswer, Receipt, Utilization,
            SamplingParams, Constraint, BeamParams, RepetitionDetector, ThinkingMarks,
            Token, Text, Failed, events.Finished, events.DraftStats, events.StepWork, events.Usage, events.Timings,
            trace.StepTrace, trace.StageTrace, trace.TokenEffect, trace.Candidate,
        )  # fmt: skip
        _KINDS.update({each.__name__: each for each in known})
    return _KINDS


# Errors ---------------------------------------------------------------------------------------------------------------
def _plain_error(error: Exception) -> dict[str, Any]:
    name = type(error).__name__
    is_ours = isinstance(error, UnspoolError) and getattr(errors, name, None) is type(error)
    plain: dict[str, Any] = {KIND: "error" if is_ours else "defect", "name": name, "message": str(error)}
    if isinstance(error, RequestError):
        plain |= {"param": error.param, "code": error.code}
    return plain


def _error(plain: Mapping[str, Any]) -> UnspoolError:
    kind = getattr(errors, plain["name"])
    if not (isinstance(kind, type) and issubclass(kind, UnspoolError)):
        raise ValueError(f"{plain['name']!r} is no error of unspool")
    error = kind(plain["message"])
    if isinstance(error, RequestError):
        error.param, error.code = plain["param"], plain["code"]
    return error


class Defect(Exception):
    """An error that is none of unspool's, of another process. Its class has the name of the original one."""


def _defect(name: str, message: str) -> Defect:
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"{name!r:.40} is no name of an error")
    error: Defect = type(name, (Defect,), {})(message)
    return error

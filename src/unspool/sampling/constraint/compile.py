"""Compile constraints: check and rewrite in Python, compile in llguidance, keep what was compiled."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, Protocol

from unspool.errors import RequestError
from unspool.sampling.constraint import native
from unspool.sampling.constraint.grammar import source
from unspool.sampling.constraint.limits import DEFAULT, Limits, Refused
from unspool.sampling.constraint.matcher import Matcher
from unspool.sampling.constraint.vocabulary import Tokenizer, vocabulary

_MAX_KEPT = 32  # a lexer at its limit of states holds some 25 MB


class Compiled(NamedTuple):
    root: Any  # llguidance's matcher, which has followed nothing
    text: str
    special: frozenset[int]


class Constraint(Protocol):
    """The part of `unspool.params.Constraint` that is looked at."""

    @property
    def kind(self) -> str: ...

    @property
    def value(self) -> Any: ...


def compile_constraint(
    constraint: Constraint, tokenizer: Tokenizer, *, limits: Limits = DEFAULT, param: str = "constraint"
) -> Matcher:
    """A matcher at the start of an answer. A constraint that cannot be honoured raises RequestError, which says why and
    where in it; `param` names the field of the request that it came from."""
    if not tokenizer.eos_ids:
        raise RequestError("a constraint says where an answer ends; this vocabulary has no end token", param)
    words = vocabulary(tokenizer)
    key = (constraint.kind, _text(constraint.value), tokenizer.fingerprint, limits)
    compiled = _kept.get(key)
    if compiled is None:
        try:
            made = source(constraint.kind, constraint.value, limits, words.special)
            root = native.build(made.text, words, limits)
            if problem := native.problem(root):
                raise Refused(problem)
            compiled = Compiled(root, made.text, made.special)
        except Refused as refused:
            raise RequestError(f"{param}: {refused}", param, "constraint_refused") from None
        except RecursionError:
            raise RequestError(f"{param}: it nests too deeply", param, "constraint_refused") from None
        _kept.put(key, compiled)
    text = compiled.text

    def rebuild() -> Any:
        _kept.drop(key)  # its lexer is full; the next request starts with another
        return native.build(text, words, limits)

    return Matcher(compiled.root, rebuild, words.allowing(compiled.special), param)


async def compile_async(
    constraint: Constraint, tokenizer: Tokenizer, *, limits: Limits = DEFAULT, param: str = "constraint"
) -> Matcher:
    """The same aside, in a thread: others go on meanwhile, and the wait has an end."""
    loop = asyncio.get_running_loop()
    work = loop.run_in_executor(
        _threads(), lambda: compile_constraint(constraint, tokenizer, limits=limits, param=param)
    )
    try:
        return await asyncio.wait_for(work, limits.seconds)
    except TimeoutError:
        raise RequestError(
            f"{param}: the {constraint.kind} takes more than {limits.seconds:g} s to compile",
            param,
            "constraint_refused",
        ) from None


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=2, thread_name_prefix="constraint")


def _text(value: Any) -> str:
    """The value as a key. What is no JSON is identified by its form; the compiler reports what is wrong with it."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return f"{type(value).__name__} {id(value)}"


class _Kept:
    """The compiled constraints used last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._entries: OrderedDict[Any, Compiled] = OrderedDict()

    def get(self, key: Any) -> Compiled | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def drop(self, key: Any) -> None:
        with self._lock:
            self._entries.pop(key, None)

    def put(self, key: Any, entry: Compiled) -> None:
        with self._lock:
            self._entries[key] = entry
            self._entries.move_to_end(key)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)


_kept = _Kept(_MAX_KEPT)

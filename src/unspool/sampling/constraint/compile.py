"""Compile constraints: check and rewrite in Python, compile in llguidance, keep what was compiled."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, Protocol

from unspool.errors import RequestError
from unspool.sampling.constraint.grammar import Source, schema_text, source
from unspool.sampling.constraint.limits import DEFAULT, Limits, Refused, path
from unspool.sampling.constraint.matcher import Matcher, short_reason
from unspool.sampling.constraint.vocabulary import Tokenizer, Vocabulary, vocabulary

_MAX_KEPT = 32  # a lexer at its limit of states holds some 25 MB
_STACK_BYTES = 256 * 2**20  # reserved, not used: some 5 kB for each definition within another
_stack_lock = threading.Lock()
_PATIENCE = 1.0  # seconds for finding the place of a failure


# Messages that speak of the rewritten schema, which nobody wrote.
_CLEARER = {
    "patternProperty regexes": "patternProperties that overlap, or may, are not supported",
    "if regex is empty": "pattern, format and lengths are too intricate together",
    "Regex is empty": "no string satisfies pattern, format and lengths together",
}


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
            compiled = Compiled(_compile(made, words, limits), made.text, made.special)
        except Refused as refused:
            raise RequestError(f"the {constraint.kind} constraint: {refused}", param, "constraint_refused") from None
        except RecursionError:
            reason = f"the {constraint.kind} constraint nests too deeply"
            raise RequestError(reason, param, "constraint_refused") from None
        _kept.put(key, compiled)
    text = compiled.text

    def rebuild() -> Any:
        _kept.drop(key)  # its lexer is full; the next request starts with another
        return _native(text, words, limits)

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
            f"the {constraint.kind} constraint takes more than {limits.seconds:g} s to compile",
            param,
            "constraint_refused",
        ) from None


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=2, thread_name_prefix="constraint")


def _text(value: Any) -> str:
    """The value as a key. What is no JSON is told apart by its form; the compiler says what is wrong with it."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return f"{type(value).__name__} {id(value)}"


def _native(text: str, words: Vocabulary, limits: Limits) -> Any:
    """llguidance's matcher. It recurses into definitions, one within another, and a stack that overflows takes the
    whole process along: it is given a stack that holds as many as a constraint can have."""
    import llguidance

    bounds = llguidance.LLParserLimits(
        max_items_in_row=limits.row_items,
        initial_lexer_fuel=limits.lexer_fuel,
        step_lexer_fuel=limits.step_fuel,
        step_max_items=limits.step_items,
        max_lexer_states=limits.lexer_states,
        max_grammar_size=limits.grammar_size,
        verbose_errors=False,
    )
    made: Future[Any] = Future()

    def build() -> None:
        try:
            made.set_result(llguidance.LLMatcher(words.native, text, log_level=0, limits=bounds))
        except BaseException as error:
            made.set_exception(error)

    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=build, name="constraint-build").start()
        finally:
            threading.stack_size(before)
    return made.result()


def _compile(made: Source, words: Vocabulary, limits: Limits) -> Any:
    root = _native(made.text, words, limits)
    problem = _problem(root)
    if not problem:
        return root
    if made.schema is None or made.places is None:
        raise Refused(problem)
    raise Refused(*_culprit(made, problem, words, limits))


def _problem(root: Any) -> str:
    """Why this grammar cannot be used; empty if it can: it compiles, and something can follow from its start."""
    if root.is_error():
        return short_reason(root.get_error())
    first = root.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        return short_reason(first.get_error())
    return "nothing matches" if first.is_stopped() and not first.is_accepting() else ""


def _culprit(made: Source, problem: str, words: Vocabulary, limits: Limits) -> tuple[str, str]:
    """The smallest part of a schema that fails by itself, and how. llguidance says what is wrong, never where."""
    assert made.schema is not None
    assert made.places is not None
    definitions = made.schema.get("$defs", {})
    node, patience = made.schema, time.monotonic() + _PATIENCE
    found = True
    while found:
        found = False
        for child in _children(node):
            if time.monotonic() > patience:
                break
            whole = {**child, "$defs": definitions} if definitions else child
            failed = _problem(_native(schema_text(whole, made.whitespace), words, limits))
            if failed:
                node, problem, found = child, failed, True
                break
    for mark, reason in _CLEARER.items():
        if mark in problem:
            problem = reason
    named = re.sub(r"json-schema:///#/\$defs/(d\d+)", lambda m: _place(made, definitions[m.group(1)]), problem)
    return named, _place(made, node)


def _place(made: Source, node: Any) -> str:
    assert made.places is not None
    return path(made.places.get(id(node), ()))


def _children(node: dict[str, Any]) -> list[dict[str, Any]]:
    children: list[Any] = []
    for key in ("properties", "patternProperties", "$defs"):
        children += node.get(key, {}).values()
    for key in ("prefixItems", "allOf", "anyOf"):
        children += node.get(key, [])
    children += [node[key] for key in ("items", "additionalProperties") if key in node]
    return [child for child in children if isinstance(child, dict)]


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

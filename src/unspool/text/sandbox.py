"""A jinja2 environment for templates written by strangers: no attribute leads out of it, and it cannot run away.

jinja2's own sandbox guards attributes and `range`. What it leaves open is bounded here: steps (loop turns and
calls, whatever is nested in whatever), the length of any text that is built on the way, and time.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
MAX_TEXT = 16 * 1024 * 1024
MAX_SECONDS = 5.0


class LimitError(Exception):
    """A template went over one of the limits; the message names it and its number."""


class TemplateRaisedError(Exception):
    """The template called `raise_exception`: it refuses these messages, and says why."""


class _Allowance:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise LimitError(f"more than {MAX_STEPS:,} steps")
        if time.monotonic() > self.deadline:
            raise LimitError(f"more than {MAX_SECONDS:g} seconds")


_TURN, _CALL = 1, 4  # a call costs about four turns of a loop
_allowance: ContextVar[_Allowance] = ContextVar("allowance")  # each thread renders with its own


def _bounded(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple) and len(value) > MAX_TEXT:
        raise LimitError(f"a value of more than {MAX_TEXT:,} characters")
    return value


# What makes a long text out of short ones must be refused before the memory is taken, not after.


def _refuse_huge_numbers(arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_TEXT:
            raise LimitError(f"a number above {MAX_TEXT:,} as an argument")


def _refuse_length(length: int) -> None:
    if length > MAX_TEXT:
        raise LimitError(f"a value of more than {MAX_TEXT:,} characters")


def _refuse_growth(method: str, text: str, arguments: Sequence[Any]) -> None:
    """`text.method(*arguments)`, for the methods of strings whose result can be far longer than all of them."""
    if method == "replace" and len(arguments) > 1 and all(isinstance(a, str) for a in arguments[:2]):
        _refuse_length(len(text) + (text.count(arguments[0]) + 1) * len(arguments[1]))
    elif method == "join" and arguments and isinstance(arguments[0], Sequence):
        _refuse_length(sum(len(part) + len(text) for part in arguments[0] if isinstance(part, str)))
    elif method in ("format", "format_map") and re.search(r"\d{6}", text):
        raise LimitError(f"a format with a width of a hundred thousand or more: {text!r:.40}")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment chat templates are written for, with every loop turn, call and growing text counted."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], cache_size=0)
        own = {"tojson": _to_json, "replace": _replace, "join": _join, "format": _format}
        self.filters = {name: _bound_filter(function) for name, function in {**self.filters, **own}.items()}
        self.filters[_TURNS] = _turns
        self.filters[_CONCAT] = _concat
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @staticmethod
    def renew() -> None:
        """A new rendering begins in this thread: its allowance is whole again."""
        _allowance.set(_Allowance())

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _TURNS, [], [], None, None, lineno=loop.lineno, environment=self)
        return _count_joins(tree, self)

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _allowance.get().spend(_CALL)
        _refuse_huge_numbers((*args, *kwargs.values()))
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _refuse_growth(getattr(__obj, "__name__", ""), owner, args)
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """jinja2 hands out its own function for `text.format`, behind which `call` cannot see the text."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _refuse_growth("format", value.__self__, ())
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _refuse_growth("format", left, ())
            _refuse_huge_numbers(right if isinstance(right, tuple) else (right,))
        elif operator in ("*", "**"):
            _refuse_product(operator, left, right)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _refuse_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


def _bound_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _allowance.get().spend(_CALL)
        _refuse_huge_numbers((*args, *kwargs.values()))
        return _bounded(function(*args, **kwargs))

    return bounded


_TURNS = "unspool_turns"
_CONCAT = "unspool_concat"


def _turns(items: Iterable[Any]) -> Iterable[Any]:
    return items if isinstance(items, jinja2.Undefined) else _Turns(items)


class _Turns:
    """What a loop walks over, each turn counted. A loop that asks for its length still gets it."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        allowance = _allowance.get()
        for item in self._items:
            allowance.spend(_TURN)
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


def _count_joins(tree: nodes.Template, environment: jinja2.Environment) -> nodes.Template:
    """`a ~ b` is no operator that the sandbox can intercept, and doubling a text thirty times is a gigabyte."""

    class Rewriter(jinja2.visitor.NodeTransformer):
        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
            self.generic_visit(node)
            parts = nodes.List(node.nodes, lineno=node.lineno, environment=environment)
            return nodes.Filter(parts, _CONCAT, [], [], None, None, lineno=node.lineno, environment=environment)

    return Rewriter().visit(tree)


def _concat(parts: list[Any]) -> str:
    texts = [part if isinstance(part, str) else str(part) for part in parts]
    _refuse_length(sum(map(len, texts)))
    return "".join(texts)


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    texts = [str(item) for item in value]
    _refuse_growth("join", d, (texts,))
    return str(d).join(texts)


def _replace(s: Any, old: str, new: str, count: int | None = None) -> str:
    _refuse_growth("replace", str(s), (str(old), str(new)))
    return str(s).replace(str(old), str(new), -1 if count is None else count)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    _refuse_growth("format", str(value), ())
    return str(jinja2.filters.do_format(str(value), *args, **kwargs))


def _refuse_product(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int) and abs(left).bit_length() * abs(right) > 4096:
            raise LimitError(f"a power too large: {left} ** {right}")
        return
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | bytes | list | tuple) and isinstance(times, int):
            _refuse_length(len(many) * times)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
        raise LimitError("a product too large")


def _raise_exception(message: Any) -> None:
    raise TemplateRaisedError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

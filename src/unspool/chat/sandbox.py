"""The jinja2 environment that chat templates are written for, and the child process that renders them.

A template is an untrusted program. jinja2's sandbox keeps it from Python's internals; its memory and time are limited
from outside, by the process this module runs in (`unspool.isolation`): a text can be made long by dozens of filters,
methods and operators, and it is easy to miss one of them.

    {"source": …}                          ─► {} or {"syntax": message}
    {"source": …, "variables": {…}}        ─► {"text": …}, {"refused": …}, {"failed": …} or {"stopped": …}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unspool.chat.template import MAX_RENDERED

KEPT = 8  # compiled templates


class TooLongError(Exception):
    """The text has more than MAX_RENDERED characters."""


class TemplateRaisedError(Exception):
    """The template called `raise_exception`: it refuses these messages with a reason."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], cache_size=0
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateRaisedError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


_environment = _make_environment()
# Once rendering begins no file can be opened, so whatever Python and jinja2 import late is imported here.
for _name in ("encodings.unicode_escape", "jinja2.debug", "html", "pprint", "textwrap"):
    import_module(_name)


@lru_cache(KEPT)
def _compile(source: str) -> tuple[jinja2.Template, bool]:
    """The template, and whether it distinguishes absent content from empty content."""
    tree = _environment.parse(source)
    knows_none = any(_tests_content(test) for test in tree.find_all((nodes.Test, nodes.Compare)))
    return _environment.from_string(tree), knows_none


def _tests_content(test: nodes.Expr) -> bool:
    """`message.content is none` in any spelling. Other templates concatenate content with text, which fails for
    none."""
    if isinstance(test, nodes.Test):
        return test.name == "none" and _is_content(test.node)
    if not isinstance(test, nodes.Compare) or not _is_content(test.expr):
        return False
    return any(isinstance(each.expr, nodes.Const) and each.expr.value is None for each in test.ops)


def _is_content(value: nodes.Expr) -> bool:
    if isinstance(value, nodes.Getitem):
        return isinstance(value.arg, nodes.Const) and value.arg.value == "content"
    return "content" in (getattr(value, "attr", None), getattr(value, "name", None))


def answer(request: bytes) -> bytes:
    """Answer a request of the parent process; see above. The process reports a MemoryError."""
    asked = json.loads(request)
    try:
        template, knows_none = _compile(asked["source"])
    except jinja2.TemplateSyntaxError as error:
        return _reply(syntax=f"line {error.lineno}: {error.message}")
    except (RecursionError, SyntaxError) as error:
        return _reply(syntax=f"too deep to compile ({type(error).__name__})")
    except ValueError as error:  # a number that is too large
        return _reply(syntax=str(error))
    if "variables" not in asked:
        return _reply()
    variables = asked["variables"]
    if not knows_none:
        variables["messages"] = [_with_content(message) for message in variables["messages"]]
    try:
        return _reply(text="".join(_collect(template.generate(variables))))
    except TemplateRaisedError as error:
        return _reply(refused=str(error)[:1000])
    except TooLongError as error:
        return _reply(stopped=str(error))
    except MemoryError:
        raise
    except Exception as error:  # any error belongs to the template
        return _reply(failed=f"{type(error).__name__}: {error}"[:1000])


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": ""} if message.get("content", "") is None else message


def _collect(chunks: Iterator[str]) -> Iterator[str]:
    length = 0
    for chunk in chunks:
        length += len(chunk)
        if length > MAX_RENDERED:
            raise TooLongError(f"it wrote more than {MAX_RENDERED:,} characters")
        yield chunk


def _reply(**values: str) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass")

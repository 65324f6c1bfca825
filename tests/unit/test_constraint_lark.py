"""Grammars: what llguidance's Lark dialect takes, less what would break an answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.fixtures.small_vocabulary import SmallVocabulary
from unspool.bench.walk import Dice
from unspool.errors import RequestError
from unspool.sampling.constraint import Matcher, compile_constraint

VOCABULARY = SmallVocabulary()
DICE = Dice(VOCABULARY)  # type: ignore[arg-type]


def made(text: str) -> Matcher:
    return compile_constraint(SimpleNamespace(kind="grammar", value=text), VOCABULARY)


ARITHMETIC = """
// sums and products
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*   # left to right
atom: NUMBER
    | "(" sum ")"
NUMBER: /[0-9]+(\\.[0-9]{1,2})?/
"""


def test_a_grammar_decides_what_is_text() -> None:
    root = made(ARITHMETIC)
    for text, expected in (
        ("1", True),
        ("1+2*(3-4.5)", True),
        ("(1", False),
        ("1+", False),
        ("", False),
        ("1.234", False),
    ):
        assert DICE.spells(root.fork(), text.encode()) is expected, text


def test_a_schema_within_a_grammar_is_held_to_the_same_rules() -> None:
    root = made('start: "<call>" %json {"type": "object", "properties": {"a": {"type": "integer"}}} "</call>"')
    assert DICE.spells(root.fork(), b'<call>{"a":1}</call>')
    assert DICE.spells(root.fork(), b'<call>{\n  "a": 1\n}</call>')
    assert not DICE.spells(root.fork(), b'<call>{"a":1,"b":[]}</call>')
    assert not DICE.spells(root.fork(), b'<call>{"a":"x"}</call>')
    assert not DICE.spells(root.fork(), b'<call>{"\\u0061":"x"}</call>')
    with pytest.raises(RequestError, match=r"line 2, column 18: \$\.properties\.a\.contains: the keyword 'contains'"):
        made('// a comment with <tool> and "quotes"\nstart: "x" %json {"properties": {"a": {"contains": {}}}}')


def test_what_a_grammar_ignores_is_not_ignored_within_a_schema() -> None:
    root = made('start: "a" %json {"type": "array", "items": {"type": "integer"}} "b"\n%ignore /#+/')
    assert DICE.spells(root.fork(), b"a[1, 2]#b")
    assert not DICE.spells(root.fork(), b"a[1,#2]b")


def test_several_schemas_in_one_grammar() -> None:
    root = made('start: %json {"type": "boolean"} "-" %json {"enum": ["x", 7]} | %json {"type": "object"}')
    for text, expected in ((b'true-"x"', True), (b"false-7", True), (b'{"a": [null]}', True), (b"true-8", False)):
        assert DICE.spells(root.fork(), text) is expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: <|end|>", r"line 1, column 8: <\|end\|> is not one special token of this vocabulary"),
        ("start: <nobody>", "<nobody> is not one special token"),
        ("start: <[0-9]>", r"<\[0-9\]> is not one special token"),
        ("start: <[*]>", "is not one special token"),
        ("start: <[97]>", "is not one special token"),
        ('start: "a" @other', "@other: there is one grammar"),
        ("start: %lark { }", "%lark is not supported"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "options are not supported"),
        ('start[temperature=0.5]: "a"', "the attribute 'temperature' is not supported"),
        ("start[max_tokens=5]: /a+/", "the attribute 'max_tokens' is not supported"),
        ('start[stop = "b"]: /a+/', "the attribute 'stop' is not supported"),
        ("start: %json {", "%json needs JSON after it"),
        ("start: missing", "unknown name"),
        ("start: (", "Expected token"),
        ('{"grammars": []}', "Lark text, not JSON"),
        ("start: A\nA: B{1000}\nB: C{1000}\nC: /ab/", "start has 2,000,000 parts"),
        ("start: /((a{100}){100}){100}/", "start has 1,000,000 parts"),
        ('start: ("a" "b"){20000}', "start has 40,000 parts"),
        (f'start: "{"a" * 5000}"', "a text of 5,002 characters"),
        ("start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(3000)), "3,001 definitions; at most 1,000"),
    ],
)
def test_refused_by_name_and_place(text: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        made(text)


@pytest.mark.parametrize(
    "text",
    [
        '%llguidance {}\nstart: "a"',
        'start: "<|end|>" /<tool>/',
        "start: WORD\n%import common.WORD",
        "start: /[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}/{1,3}",
        'start: head "x"\nhead[lazy]: /.*<c>/',
        'start: "temperature" "=" "stop"',
    ],
)
def test_taken(text: str) -> None:
    made(text).mask()


def test_long_chains_of_definitions_do_not_overflow_the_stack() -> None:
    chain = "".join(f'T{n}: (((T{n + 1} | "q{n}")?)?)?\n' for n in range(990))
    made(f'start: T0\n{chain}T990: "y"').mask()

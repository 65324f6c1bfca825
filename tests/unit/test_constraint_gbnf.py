"""GBNF grammars accept exactly what they say, and what cannot be represented is refused by line."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from unspool.errors import RequestError
from unspool.params import Constraint
from unspool.sampling.constraint import compile_constraint


@pytest.fixture(scope="module")
def tokenizer(smollm2: Any) -> Any:
    return smollm2.tokenizer()


def accepts(tokenizer: Any, grammar: str, text: str) -> bool:
    matcher = compile_constraint(Constraint("grammar", grammar), tokenizer)
    for token in tokenizer.encode(text, add_special=False):
        if not matcher.check(token):
            return False
        matcher.accept(token)
    return matcher.is_accepting


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= "yes" | "no" [.!]{0,2} # or less', ["yes", "no", "no.!"], ["yes!", "no...", "", "nox"]),
        ('root ::= a ("-" a)*\na ::= [^0-9\\-]+', ["x", "x-yz"], ["1", "x-", "-"]),
        ('root ::= (\n  "a"\n  | "b" # two\n)+\n', ["a", "ba"], ["c", ""]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\"\\n/"', ['Aé😀"\n/'], ["A"]),
        ('root ::= s\ns ::= "(" s ")" | [a-z]* "ab" | ""', ["", "abxab", "((zab))", "(())"], ["abx", "(ab", ")"]),
        ("root ::= .{2}", ["ab", "\n☃"], ["a", "abc"]),
        ('root ::= "" | "a"', ["", "a"], ["b"]),
        ('root ::= x-1 "b"?\nx-1 ::= "a"{2,}\nunused ::= unused', ["aa", "aaab"], ["a", "ab"]),
    ],
)
def test_what_a_grammar_accepts(tokenizer: Any, grammar: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not accepts(tokenizer, grammar, text)] == []
    assert [text for text in wrong if accepts(tokenizer, grammar, text)] == []


def language(node: Any, rules: dict[str, Any], depth: int) -> set[str]:
    """All texts of at most four characters that a random grammar's node stands for, rules nested up to `depth`."""
    kind, *rest = node
    if kind == "text":
        return {rest[0]}
    if kind == "name":
        return language(rules[rest[0]], rules, depth - 1) if depth else set()
    if kind == "or":
        return language(rest[0], rules, depth) | language(rest[1], rules, depth)
    first, found = language(rest[0], rules, depth), {""}
    if kind == "then":
        second = language(rest[1], rules, depth)
        return {a + b for a in first for b in second if len(a + b) <= 4}
    while True:  # any number of times
        more = found | {a + b for a in found for b in first if len(a + b) <= 4}
        if more == found:
            return found
        found = more


def written(node: Any) -> str:
    kind, *rest = node
    if kind == "text":
        return f'"{rest[0]}"' if len(rest[0]) != 1 else f"[{rest[0]}]"
    if kind == "name":
        return str(rest[0])
    if kind == "many":
        return f"({written(rest[0])})*"
    return f"({written(rest[0])}{' | ' if kind == 'or' else ' '}{written(rest[1])})"


def test_random_grammars_accept_exactly_their_language(tokenizer: Any) -> None:
    rng = random.Random(11)
    texts = ["".join(t) for size in range(5) for t in itertools.product("ab", repeat=size)]

    def node(depth: int) -> Any:
        kind = rng.choice(["text", "name", "or", "then", "then", "many"] if depth else ["text"])
        if kind == "text":
            return kind, rng.choice(["a", "b", "ab", "ba", "bab"])
        if kind == "name":
            return kind, rng.choice(["root", "x"])
        return (kind, node(depth - 1)) if kind == "many" else (kind, node(depth - 1), node(depth - 1))

    num_compared = 0
    while num_compared < 25:
        # A rule begins with a character, so that every recursion consumes one and `depth` 5 covers four characters.
        rules = {name: ("or", ("text", "a"), ("then", ("text", "b"), node(3))) for name in ("root", "x")}
        expected = language(rules["root"], rules, 6)
        grammar = "".join(f"{name} ::= {written(rule)}\n" for name, rule in rules.items())
        assert {text for text in texts if accepts(tokenizer, grammar, text)} == expected, grammar
        num_compared += 1


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('x ::= "a"', "root"),
        ("root ::= x", "x is used and not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule root is defined twice"),
        ('root ::= "a', "line 1: expected"),
        ('root ::= "a"\n\nx ::= ("b"', "line 3: expected )"),
        ("root ::= !<think>", "line 1: all tokens but one"),
        ("root ::= [z-a]", "line 1: a range"),
        ('root ::= "\\q"', "line 1: unknown escape"),
        ('root ::= "\\uD800"', "line 1: U+D800"),
        ('root ::= "a"{99999}', "line 1: repetitions"),
        ("root ::= " + "(" * 60 + '"a"' + ")" * 60, "nest deeper"),
    ],
)
def test_what_cannot_be_represented_is_refused(tokenizer: Any, grammar: str, reason: str) -> None:
    with pytest.raises(RequestError) as refused:
        compile_constraint(Constraint("grammar", grammar), tokenizer)
    assert reason in str(refused.value)

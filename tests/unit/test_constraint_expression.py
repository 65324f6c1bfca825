"""Expressions: what the dialect accepts, Python's `re` accepts; what it does not know, it refuses by name."""

from __future__ import annotations

import json
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.small_vocabulary import SmallVocabulary
from unspool.bench.walk import Dice
from unspool.sampling.constraint import Matcher, compile_constraint
from unspool.sampling.constraint.expression import literal
from unspool.sampling.constraint.limits import Refused
from unspool.sampling.constraint.rendering import string_terminal

VOCABULARY = SmallVocabulary()
DICE = Dice(VOCABULARY)  # type: ignore[arg-type]


def whole(pattern: str) -> Matcher:
    return compile_constraint(SimpleNamespace(kind="regex", value=pattern), VOCABULARY)


def anywhere(pattern: str) -> Matcher:
    value = {"type": "string", "pattern": pattern}
    return compile_constraint(SimpleNamespace(kind="json_schema", value=value), VOCABULARY)


TABLE = [
    # pattern, texts that it finds something in, texts that it does not
    ("b", ["b", "abc"], ["", "a"]),
    ("^b", ["b", "bc"], ["ab"]),
    ("b$", ["ab"], ["ba"]),
    ("^b$", ["b"], ["bb", ""]),
    ("^$", [""], ["a"]),
    ("", ["", "a"], []),
    ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
    ("(^a|b)c$", ["ac", "xbc"], ["xac", "bcx"]),
    ("(?:^a$)|(^b$)", ["a", "b"], ["ab"]),
    ("^(a|b)*$", ["", "abba"], ["abc"]),
    ("a{2,3}?b", ["aab", "xaaab"], ["ab"]),
    ("^a{2}$", ["aa"], ["a", "aaa"]),
    ("^a{2,}$", ["aa", "aaaa"], ["a"]),
    ("^[a-c]+$", ["abc"], ["abd"]),
    ("^[^a-c]+$", ["xyz", "é"], ["xa"]),
    ("^[]x]?$".replace("[]", "[\\]"), ["]", "x"], ["y"]),
    ("^[a\\-z]+$", ["a-z"], ["b"]),
    ("^[a-]+$", ["a-"], ["b"]),
    ("^[.*+?(){}|^$]+$", [".*+?(){}|^$"], ["a"]),
    ("^[[&&~~--]+$".replace("--", "\\-\\-"), ["[&~-"], ["a"]),
    (r"^\d\w\s$", ["1_ ", "9z "], ["aa ", "11a"]),
    (r"^\D\W\S$", ["a-b", "é b".replace(" ", "!")], ["1-b", "aab"]),
    (r"^[\d.]+$", ["1.5"], ["1,5"]),
    (r"^[^\d\s]+$", ["ab"], ["a1", "a b"]),
    (r"^\x41\u00e9\.\/\-$", ["Aé./-"], ["Aé/-"]),
    (r"^\t\n$", ["\t\n"], ["tn"]),
    ("^.$", ["a", "日", "😀"], ["", "\n", "\r", "\u2028"]),
    ("^a/b#c d$", ["a/b#c d"], ["a/b"]),
    ("^[а-я]+$", ["привет"], ["hello"]),
    ("x*", ["", "abc"], []),
    ("(^a)?b", ["ab", "xb"], ["a"]),
    ("^(?!ab)[a-c]+$", ["ac", "ba", "a"], ["ab", "abc", ""]),
    ("^(?=.*[0-9])(?=.*[a-z]).{3,5}$", ["a1_", "12a45"], ["abc", "1a", "abc1ef"]),
    ("^(?!a|b$)", ["ca", "bc", ""], ["ab", "b"]),
    ('^["\\\\n]+$', ['"', "\\n", 'n"'], ["a"]),
    ('^[^"]$', ["\n", "\\", "a"], ['"']),
    ("^{a{b}$", ["{a{b}"], ["ab"]),
    ("^(a(b(c)?)?)?$", ["", "a", "ab", "abc"], ["b", "ac"]),
]


@pytest.mark.parametrize(("pattern", "found", "missed"), TABLE, ids=[pattern for pattern, *_ in TABLE])
def test_patterns(pattern: str, found: list[str], missed: list[str]) -> None:
    root = anywhere(pattern)
    for text in found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # [[ and && mean something to other dialects
            assert re.search(pattern, text)
        assert DICE.spells(root.fork(), _json(text)), text
    for text in missed:
        assert not DICE.spells(root.fork(), _json(text)), text


def _json(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)", r"\(\?= is only supported right after a \^"),
        ("a(?!b)", r"\(\?! is only supported right after a \^"),
        ("^(?!a)b|c", r"\(\?! is only supported right after a \^"),
        ("^((?!a).)*$", r"\(\?! is only supported right after a \^"),
        ("(?<=a)", r"\(\?< is not supported: no lookbehind"),
        ("(?P<n>a)", r"\(\?P is not supported"),
        ("(?i)a", r"\(\?i is not supported"),
        (r"(a)\1", "back-references are not supported"),
        (r"\bword", r"\\b is not supported"),
        (r"\p{L}", r"\\p is not supported"),
        (r"\Aa\Z", r"\\A is not supported"),
        (r"\ca", r"\\c is not supported"),
        ("a^b", r"\^ is only supported at the ends"),
        ("x(^a)?b", r"\^ is only supported at the ends"),
        ("$a", r"\$ is only supported at the ends"),
        ("^*", r"\^ cannot be repeated"),
        ("a**", "a repetition of a repetition needs a group"),
        ("a{2}{3}", "a repetition of a repetition needs a group"),
        ("a++", "a repetition of a repetition needs a group"),
        ("*a", r"nothing to repeat before \*"),
        ("a{,3}", r"\{,3\} needs bounds"),
        ("{2}", r"nothing to repeat before \{"),
        ("a{3,2}", "is backwards"),
        ("[b-a]", "a range is backwards"),
        ("[]a]", r"a set that starts with \]"),
        ("[a", "ends too soon"),
        (r"[\d-z]", "cannot start a range"),
        (r"[a-\d]", "cannot end a range"),
        ("(a", "never closed"),
        ("a)", "never opened"),
        ("\\", "ends too soon"),
        (r"\x4", r"\\x needs 2 hexadecimal digits"),
        (r"\ud800", "half a surrogate pair"),
        ("(" * 60 + ")" * 60, "groups nest deeper than 40"),
        ("(a{100}){101}", "10,100 parts"),
        ("a{1234567890}", "needs bounds from 0 to 999,999,999"),
    ],
)
def test_what_is_not_in_the_dialect_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        string_terminal(pattern)


def test_a_control_character_cannot_stand_in_json_but_can_in_text() -> None:
    with pytest.raises(Refused, match=r"U\+0001 is not written"):
        string_terminal("\x01")
    assert DICE.spells(whole("\x01"), b"\x01")


def test_validators_disagree_beyond_ascii_and_the_translation_keeps_to_both() -> None:
    assert not DICE.spells(anywhere(r"^\d$"), '"٣"'.encode())
    assert not DICE.spells(anywhere(r"^\D$"), '"٣"'.encode())
    assert not DICE.spells(anywhere(r"^[^\w]$"), '"é"'.encode())
    assert string_terminal("[0-9a-f]+").is_exact
    for pattern in (r"\d", ".", r"[^\s]", "a$", r"^(?!\d)a"):
        assert not string_terminal(pattern).is_exact
    assert string_terminal(".*a").is_exact, "what stands beside anything adds nothing"


def test_any_text_can_be_a_literal() -> None:
    text = "a/b\\c[d]{e}(f)|g^h$i.j*k+l?m\n#é😀~&-"
    assert DICE.spells(compile_constraint(SimpleNamespace(kind="choice", value=[text]), VOCABULARY), text.encode())
    assert re.fullmatch(r"(?:\\u\{[0-9A-F]+\}|[a-m])+", literal(text))


CLASSES = [r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "[ab1]", "[^a]", r"[^\d]"]
ATOMS = st.sampled_from(["a", "b", "é", "1", " ", "-", ".", *CLASSES])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}?"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(PATTERNS, st.sampled_from(["", "^"]), st.sampled_from(["", "$"]), st.integers(0, 1000))
def test_whatever_is_generated_python_finds(pattern: str, start: str, end: str, seed: int) -> None:
    pattern = f"{start}{pattern}{end}" if "|" not in pattern else f"{start}(?:{pattern}){end}"
    for number in range(3):
        rng = np.random.default_rng([seed, number])
        walk = DICE.walk(whole(pattern), rng, limit=60)
        if walk.finished:
            assert re.fullmatch(pattern, walk.text.decode()), (pattern, walk.text)


@settings(max_examples=80, deadline=None)
@given(PATTERNS, st.text(alphabet="ab1é -", max_size=4))
def test_ascii_texts_that_python_matches_are_accepted(pattern: str, text: str) -> None:
    if text.isascii():
        assert DICE.spells(whole(pattern), text.encode()) is (re.fullmatch(pattern, text, re.ASCII) is not None)

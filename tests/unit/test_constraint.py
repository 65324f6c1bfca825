"""Matchers: what may follow, what must, going back, forking, ending, failing alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fixtures.small_vocabulary import SmallVocabulary
from unspool.bench.walk import Dice, allowed
from unspool.errors import RequestError
from unspool.sampling.constraint import Limits, Matcher, compile_async, compile_constraint, native

VOCABULARY = SmallVocabulary()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "item": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name"],
    "additionalProperties": False,
}
COMPACT = PERSON | {"x-unspool": {"whitespace": "compact"}}
CONSTRAINTS: dict[str, tuple[str, Any]] = {
    "object": ("json_object", None),
    "schema": ("json_schema", PERSON),
    "spaced schema": ("json_schema", PERSON | {"x-unspool": {"whitespace": "flexible"}}),
    "compact schema": ("json_schema", COMPACT),
    "expression": ("regex", r"(alpha|beta)(, (alpha|beta)){0,3}"),
    "choice": ("choice", ["alpha", "alphabet", "beta", "the beta", "日本語"]),
    "grammar": ("grammar", 'start: "A" x c | "B" x d\nx: "i" | "o"\nc: "n" | "s"\nd: "f" | "r"'),
    "grammar with a token": ("grammar", 'start: (TEXT <tool> ("a" | "b"))* TEXT\nTEXT: /[a-z]*/'),
}


def made(kind: str, value: Any = None, vocabulary: Any = VOCABULARY, **options: Any) -> Matcher:
    return compile_constraint(SimpleNamespace(kind=kind, value=value), vocabulary, **options)


def ids(matcher: Matcher) -> set[int]:
    return set(allowed(matcher.mask(), VOCABULARY.vocab_size).tolist())


def texts(matcher: Matcher) -> set[bytes]:
    return {VOCABULARY.token_bytes(token) for token in ids(matcher) - VOCABULARY.eos_ids}


def token(text: bytes) -> int:
    return next(token for token in range(VOCABULARY.vocab_size) if VOCABULARY.token_bytes(token) == text)


def follow(matcher: Matcher, text: str) -> Matcher:
    assert Dice(VOCABULARY).spells(matcher, text.encode()) or not matcher.is_accepting  # type: ignore[arg-type]
    return matcher


@pytest.fixture(params=CONSTRAINTS)
def root(request: pytest.FixtureRequest) -> Matcher:
    return made(*CONSTRAINTS[request.param])


def steps(root: Matcher, seed: int, limit: int = 40) -> Iterator[Matcher]:
    """A walk's matcher at every place of it."""
    matcher, dice, rng = root.fork(), Dice(VOCABULARY), np.random.default_rng(seed)  # type: ignore[arg-type]
    for length in range(limit):
        yield matcher
        chosen = dice.roll(allowed(matcher.mask(), VOCABULARY.vocab_size), length, rng)
        matcher.accept(chosen)
        if chosen in VOCABULARY.eos_ids:
            return


# ---- what may follow


def test_check_and_mask_agree_on_every_token(root: Matcher) -> None:
    for seed in range(3):
        for matcher in steps(root, seed):
            mask = ids(matcher)
            assert {token for token in range(VOCABULARY.vocab_size) if matcher.check(token)} == mask


def test_only_allowed_tokens_are_accepted() -> None:
    matcher = made("choice", ["alpha"])
    with pytest.raises(ValueError, match="not allowed"):
        matcher.accept(token(b"beta"))
    with pytest.raises(ValueError, match="ends the answer"):
        matcher.accept(min(VOCABULARY.eos_ids))
    assert not matcher.check(-1)
    assert not matcher.check(VOCABULARY.vocab_size)


def test_choices_are_exact() -> None:
    matcher = made("choice", ["alpha", "alphabet", "beta"])
    assert texts(matcher) == {b"a", b"al", b"alpha", b"alphabet", b"b", b"beta"}
    matcher.accept(token(b"alpha"))
    assert matcher.is_accepting
    assert not matcher.is_finished
    assert texts(matcher) == {b"b"}


def test_an_expression_matches_the_whole_answer() -> None:
    dice = Dice(VOCABULARY)  # type: ignore[arg-type]
    root = made("regex", "b|ab{2}")
    for text, expected in (("b", True), ("abb", True), ("ab", False), ("abbb", False), ("bb", False), ("xb", False)):
        assert dice.spells(root.fork(), text.encode()) is expected, text


# ---- ends


def test_end_tokens_are_allowed_exactly_where_the_grammar_accepts(root: Matcher) -> None:
    for seed in range(3):
        for matcher in steps(root, seed):
            assert bool(ids(matcher) & VOCABULARY.eos_ids) == matcher.is_accepting
            if matcher.is_accepting:
                assert ids(matcher) >= VOCABULARY.eos_ids
            if matcher.is_finished:
                assert ids(matcher) == VOCABULARY.eos_ids


def test_an_end_can_be_taken_back() -> None:
    matcher = made("choice", ["alpha", "alphabet"])
    matcher.accept(token(b"alpha"))
    before = ids(matcher)
    matcher.accept(min(VOCABULARY.eos_ids))
    assert matcher.is_finished
    assert ids(matcher) == VOCABULARY.eos_ids
    matcher.rollback(1)
    assert not matcher.is_finished
    assert ids(matcher) == before
    matcher.rollback(1)
    with pytest.raises(ValueError, match="cannot take back 1 of 0"):
        matcher.rollback(1)


def test_an_answer_may_be_empty() -> None:
    matcher = made("regex", "a?")
    assert matcher.is_accepting
    assert texts(matcher) == {b"a"}


# ---- what must follow


def test_forced_tokens_are_those_that_decoding_step_by_step_would_choose(root: Matcher) -> None:
    num_forced = 0
    for seed in range(4):
        for matcher in steps(root, seed):
            forced = matcher.forced()
            num_forced += len(forced)
            plain = matcher.fork()
            for one in forced:
                assert ids(plain) == {one}
                plain.accept(one)
            assert plain.is_finished or len(ids(plain)) > 1 or plain.is_accepting or not forced


def test_known_text_is_forced_as_the_tokenizer_writes_it() -> None:
    matcher = made("json_schema", COMPACT)
    assert [VOCABULARY.token_bytes(one) for one in matcher.forced()] == [b'{"', b"name"]
    assert matcher.forced() == matcher.forced(), "asking commits nothing"


# ---- going back and forking


def test_a_walk_with_ways_back_has_the_masks_of_a_straight_one(root: Matcher) -> None:
    dice, rng = Dice(VOCABULARY), np.random.default_rng(5)  # type: ignore[arg-type]
    for _ in range(4):
        matcher, taken = root.fork(), []
        for step in range(60):
            if taken and rng.random() < 0.3:
                count = int(rng.integers(1, len(taken) + 1))
                matcher.rollback(count)
                del taken[-count:]
            straight = root.fork()
            for one in taken:
                straight.accept(one)
            np.testing.assert_array_equal(matcher.mask(), straight.mask())
            assert matcher.is_accepting == straight.is_accepting
            assert matcher.forced() == straight.forced()
            chosen = dice.roll(allowed(matcher.mask(), VOCABULARY.vocab_size), step, rng)
            matcher.accept(chosen)
            taken.append(chosen)
            if chosen in VOCABULARY.eos_ids:
                matcher.rollback(1)
                taken.pop()


def test_going_back_forgets_the_mask_of_the_way_not_taken() -> None:
    """After "A" and after "B" the parser has the same row number and the same lexer state, and other continuations."""
    matcher = made(*CONSTRAINTS["grammar"])
    matcher.accept(token(b"A"))
    assert {b"in", b"is", b"on", b"os"} <= texts(matcher)
    matcher.rollback(1)
    matcher.accept(token(b"B"))
    assert {b"if", b"ir", b"or"} <= texts(matcher)
    assert not {b"in", b"is", b"on", b"os"} & texts(matcher)


def test_forks_go_their_own_ways(root: Matcher) -> None:
    for matcher in steps(root, seed=1, limit=12):
        mask = matcher.mask().copy()
        for chosen in sorted(ids(matcher) - VOCABULARY.eos_ids)[:3]:
            twin = matcher.fork()
            twin.accept(chosen)
            twin.mask()
        np.testing.assert_array_equal(matcher.mask(), mask)


# ---- vocabularies


def test_special_tokens_are_never_text() -> None:
    for kind, value in (("regex", r"[\s\S]*"), ("json_object", None), ("choice", ["<|start|>", "<tool>"])):
        for matcher in steps(made(kind, value), seed=0, limit=20):
            assert not ids(matcher) & (VOCABULARY.special_ids - VOCABULARY.eos_ids)


def test_a_grammar_may_name_a_special_token() -> None:
    matcher = made("grammar", 'start: "a" <tool> "b"')
    matcher.accept(token(b"a"))
    assert ids(matcher) == {VOCABULARY.tool_id}
    assert not matcher.check(token(b"<"))
    matcher.accept(VOCABULARY.tool_id)
    matcher.accept(token(b"b"))
    assert matcher.is_finished
    matcher.rollback(2)
    assert ids(matcher) == {VOCABULARY.tool_id}


def test_of_tokens_with_the_same_bytes_one_is_used() -> None:
    doubled = SmallVocabulary(doubled=True)
    matcher = made("choice", ["a", "name"], doubled)
    found = [doubled.token_bytes(one) for one in allowed(matcher.mask(), doubled.vocab_size)]
    assert sorted(found) == [b"a", b"n", b"name"]


def test_a_tokenizer_that_writes_a_space_in_front_still_forces_the_text() -> None:
    class Spaced(SmallVocabulary):
        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            return super().encode(" " + text)

    spaced = Spaced()
    spaced.fingerprint += " spaced"
    for value in (COMPACT, {"const": "the foobar"}):
        matcher = made("json_schema", value, spaced)
        data = b""
        for one in matcher.forced():
            data += spaced.token_bytes(one)
        assert (b'{"name":"' if value is COMPACT else b'"the foobar"').startswith(data)
        assert data


def test_a_vocabulary_without_an_end_is_refused() -> None:
    endless = SmallVocabulary()
    endless.eos_ids = frozenset()
    with pytest.raises(RequestError, match="no end token"):
        made("regex", "a", endless)


# ---- compiling


def test_the_compiled_form_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    build = native.build
    monkeypatch.setattr(native, "build", lambda *args: compiled.append(args) or build(*args))
    value = {"type": "integer", "minimum": 4711}
    first = made("json_schema", value)
    assert len(compiled) == 1
    follow(first, "5000")
    second = made("json_schema", json.loads(json.dumps(value)))
    assert len(compiled) == 1
    assert b"4" in texts(second), "at its start, wherever the first went"
    made("json_schema", value, limits=Limits(max_depth=7))
    assert len(compiled) == 2, "other limits, another outcome"


def test_compiling_aside() -> None:
    async def go() -> list[Matcher]:
        jobs = [compile_async(SimpleNamespace(kind="regex", value=f"a{{{n}}}"), VOCABULARY) for n in range(1, 9)]
        return await asyncio.gather(*jobs)

    for count, matcher in enumerate(asyncio.run(go()), 1):
        assert follow(matcher, "a" * count).is_finished


def test_compiling_aside_has_an_end() -> None:
    limits = Limits(seconds=0.0)
    constraint = SimpleNamespace(kind="choice", value=[f"never compiled {n}" for n in range(500)])
    with pytest.raises(RequestError, match="more than 0 s to compile") as raised:
        asyncio.run(compile_async(constraint, VOCABULARY, limits=limits, param="response_format"))
    assert raised.value.param == "response_format"


def test_a_refusal_names_field_and_reason() -> None:
    with pytest.raises(RequestError, match=r"response_format: \(\?= is only supported") as raised:
        made("regex", "(?=a)", param="response_format")
    assert raised.value.param == "response_format"
    assert raised.value.code == "constraint_refused"
    for kind, value, reason in (
        ("regex", "a" * 300_000, "300,000 bytes; at most 262,144"),
        ("regex", "\ud800", "half a surrogate pair"),
        ("choice", ["a", ""], "non-empty strings"),
        ("choice", ["a" * 5000], "more than 4,096 characters"),
        ("choice", [str(n) for n in range(10_001)], "10,001 choices"),
        ("telepathy", "a", "no kind of constraint"),
        ("json_object", {"colour": 1}, "takes an object with 'whitespace'"),
        ("json_object", {"whitespace": "plenty"}, "allowed: model, compact, flexible"),
    ):
        with pytest.raises(RequestError, match=reason):
            made(kind, value)


# ---- limits at run time


def test_a_limit_met_on_the_way_fails_by_name_instead_of_ending_the_answer() -> None:
    matcher = made("regex", "[a-z]{300}", limits=Limits(lexer_states=40))

    def go() -> None:
        for _ in range(300):
            assert not matcher.is_accepting
            matcher.mask()
            matcher.accept(token(b"x"))

    with pytest.raises(RequestError, match=r"cannot be followed after \d+ tokens: .*states") as raised:
        go()
    assert raised.value.param == "constraint"
    for ask in (matcher.mask, lambda: matcher.is_finished, lambda: matcher.is_accepting, lambda: matcher.check(0)):
        with pytest.raises(RequestError, match="cannot be followed"):
            ask()


def test_what_others_did_with_a_shared_lexer_fails_nobody() -> None:
    """Letters and digits each need about half of the states; together they exceed them."""
    limits = Limits(lexer_states=90)
    for text in ("x" * 50, "7" * 50, "x" * 50, "7" * 50):
        matcher = made("regex", "[a-z]{50}|[0-9]{50}", limits=limits)
        for letter in text:
            matcher.mask()
            matcher.accept(token(letter.encode()))
        assert matcher.is_finished
        matcher.rollback(10)
        assert follow(matcher, text[:10]).is_finished

"""Reasoning is told from the answer, in every format and however the text is cut; and it ends within its budget."""

from __future__ import annotations

import random
from typing import Any

import pytest

from unspool.chat.answers import AnswerSyntax, Message
from unspool.chat.call_formats import HERMES
from unspool.chat.reasoning import COMMAND, GEMMA, HARMONY, MISTRAL, THINK, ReasoningFormat, reasoning_format_of
from unspool.params import Constraint, ThinkingMarks
from unspool.sampling.constraint import ThinkingMatcher, compile_constraint

LOOK = frozenset({"look"})
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
HARMONY_CALL = '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"at": 1}<|call|>'


def read(syntax: AnswerSyntax, pieces: list[str]) -> tuple[Any, ...]:
    message = Message(None, syntax)
    for piece in pieces:
        message.push(piece)
    message.flush()
    return message.reasoning, message.content, [(call.name, call.arguments) for call in message.calls]


WRITTEN: list[tuple[ReasoningFormat, str, str, tuple[Any, ...]]] = [
    (THINK, "", "<think>\nTwo.\n\nFour?\n</think>\n\nFour.", ("Two.\n\nFour?", "Four.", [])),
    (THINK, "", "\n<think>\n\n</think>\n\nFour.", ("", "Four.", [])),
    (THINK, "", "Four, </think> and <think> no more.", ("", "Four, </think> and <think> no more.", [])),
    (THINK, "", " <b>Four</b>", ("", " <b>Four</b>", [])),
    (THINK, "", "<think>cut sho", ("cut sho", "", [])),
    (THINK, "", "<thi", ("", "<thi", [])),
    (THINK, "<think>", "Two</thin</think>Four", ("Two</thin", "Four", [])),
    (THINK, "<think>Begun", " and done.\n</think>\n\nFour", (" and done.", "Four", [])),
    (THINK, "<think></think>The answer is", " four. <think>", ("", " four. <think>", [])),
    (THINK, "", f"<think>Look!</think>\n{CALL}", ("Look!", "", [("look", '{"at": 1}')])),
    (MISTRAL, "", "[THINK]Two.[/THINK]Four", ("Two.", "Four", [])),
    (GEMMA, "", "<|channel>thought\nTwo.\n<channel|>Four", ("Two.", "Four", [])),
    (COMMAND, "", "<|START_THINKING|>Two.<|END_THINKING|>Four", ("Two.", "Four", [])),
    (
        HARMONY,
        "",
        "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>Four",
        ("Two.", "Four", []),
    ),
    (HARMONY, "", f"<|channel|>analysis<|message|>Two.<|end|>{HARMONY_CALL}", ("Two.", "", [("look", '{"at": 1}')])),
    (HARMONY, "", "<|channel|>commentary to=functions.other<|message|>{}", ("", "{}", [])),
    (HARMONY, "", "No channel at all", ("", "No channel at all", [])),
    (HARMONY, "<|channel|>final<|message|>Fo", "ur", ("", "ur", [])),
]


@pytest.mark.parametrize(("format", "begins", "text", "expected"), WRITTEN)
def test_an_answer_in_pieces_is_the_whole_however_it_is_cut(
    format: ReasoningFormat, begins: str, text: str, expected: tuple[Any, ...]
) -> None:
    syntax = AnswerSyntax(HERMES, LOOK, reasoning=format, begins=begins)
    assert read(syntax, [text]) == expected
    assert read(syntax, list(text)) == expected
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.randrange(len(text)) for _ in range(rng.randrange(1, 5)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(syntax, pieces) == expected


def test_random_texts_of_marks_lose_nothing_and_do_not_depend_on_the_cuts() -> None:
    rng = random.Random(5)
    for format in (THINK, MISTRAL, GEMMA, HARMONY):
        marks = [format.opens, format.closes, *format.marks, "a", "\n", " ", "<", CALL, HARMONY_CALL]
        for _ in range(200):
            text = "".join(rng.choice(marks) for _ in range(rng.randrange(1, 9)))
            syntax = AnswerSyntax(HERMES, LOOK, reasoning=format)
            assert read(syntax, [text]) == read(syntax, list(text)), text


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ m.content }}", None),
        ("{% if enable_thinking %}<think>{% endif %}", THINK),
        ("[THINK]", MISTRAL),
        ("<|channel>thought", GEMMA),
        ("<|START_THINKING|>", COMMAND),
        ("<|start|>assistant<|channel|>analysis<|message|>", HARMONY),
    ],
)
def test_the_format_is_known_from_the_template(template: str, format: ReasoningFormat | None) -> None:
    assert reasoning_format_of(template) is format


# Budgets and constraints ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer(smollm2: Any) -> Any:
    return smollm2.tokenizer()


MARKS = ThinkingMarks("<think>", "</think>", "\n</think>\n\n", "\n\n")
OPEN = ThinkingMarks("<think>", "</think>", "\n</think>\n\n", "\n\n", is_open=True)


def follow(matcher: ThinkingMatcher, tokenizer: Any, text: str) -> None:
    for token in tokenizer.encode(text, add_special=False):
        assert matcher.check(token), tokenizer.token_text(token)
        mask = matcher.mask()
        assert mask is None or mask[token // 32] >> (token % 32) & 1
        matcher.accept(token)


def written(matcher: ThinkingMatcher, tokenizer: Any) -> str:
    """What must follow, token by token, and as a list."""
    reported, text = matcher.fork().forced(), ""
    for token in reported:
        mask = matcher.mask()
        assert mask is not None
        assert [word for word in mask if word] == [1 << (token % 32)]
        matcher.accept(token)
        text += tokenizer.token_text(token)
    return text


def test_thinking_is_closed_when_its_budget_is_spent(tokenizer: Any) -> None:
    matcher = ThinkingMatcher(OPEN, 3, None, tokenizer)
    words = tokenizer.encode(" one two three four", add_special=False)
    for token in words[:3]:
        matcher.accept(token)
    assert written(matcher, tokenizer) == "\n</think>\n\n"
    assert matcher.mask() is None, "the answer is free"
    matcher.accept(words[3])
    matcher.rollback(4 + len(tokenizer.encode("\n</think>\n\n", add_special=False)) - 3)
    matcher.rollback(0)
    assert ThinkingMatcher(OPEN, 0, None, tokenizer).forced(), "a budget of nothing closes at once"


def test_a_constraint_holds_for_what_follows_thinking(tokenizer: Any) -> None:
    answer = compile_constraint(Constraint("choice", ["yes", "no"]), tokenizer)
    matcher = ThinkingMatcher(OPEN, None, answer, tokenizer)
    start = matcher.fork()
    assert not any(matcher.check(end) for end in tokenizer.eos_ids)
    follow(matcher, tokenizer, "Let me see </think>")
    assert written(matcher, tokenizer) == "\n\n"
    assert not matcher.check(tokenizer.encode("maybe", add_special=False)[0])
    follow(matcher, tokenizer, "yes")
    assert matcher.is_finished
    matcher.rollback(1)
    assert not matcher.is_finished
    follow(matcher, tokenizer, "no")
    assert matcher.is_finished
    follow(start, tokenizer, "Again </think>")
    assert written(start, tokenizer) == "\n\n"
    follow(start, tokenizer, "no")
    assert start.is_finished, "a fork goes on by itself"


def test_thinking_may_be_begun_or_left_out_before_a_constraint(tokenizer: Any) -> None:
    answer = compile_constraint(Constraint("choice", ["yes", "no"]), tokenizer)
    matcher = ThinkingMatcher(MARKS, None, answer, tokenizer)
    direct = matcher.fork()
    follow(direct, tokenizer, "yes")
    assert direct.is_finished
    follow(matcher, tokenizer, "<think>")
    follow(matcher, tokenizer, "Hm </think>")
    assert written(matcher, tokenizer) == "\n\n"
    follow(matcher, tokenizer, "no")
    assert matcher.is_finished
    for _ in range(3):
        matcher.rollback(1)
    with pytest.raises(ValueError, match="cannot take back"):
        matcher.rollback(1000)

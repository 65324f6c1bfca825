"""Calls are found however the text is cut, and what is no call is content again, every character."""

from __future__ import annotations

import json
import random

import pytest

from unspool.chat.call_formats import GENERIC, HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, CallFormat, format_of
from unspool.chat.call_parser import CallParser
from unspool.chat.parts import Arguments, Begin, Content

NAMES = frozenset({"look", "go"})


def parse(format: CallFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls, with their arguments joined."""
    parser = CallParser(format, NAMES)
    content, calls = "", []
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.flush():
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, Begin):
            assert part.index == len(calls)
            calls.append([part.name, ""])
        elif isinstance(part, Arguments):
            calls[part.index][1] += part.text
    return content, [(name, arguments) for name, arguments in calls]


def every_cut(format: CallFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Parsed whole, character by character and at random cuts: always the same."""
    whole = parse(format, [text])
    assert parse(format, list(text)) == whole
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(format, pieces) == whole
    return whole


LOOK = '{"name": "look", "arguments": {"at": [1, {"x": "}\\"]"}], "deep": true}}'
ARGUMENTS = '{"at": [1, {"x": "}\\"]"}], "deep": true}'


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (HERMES, f"Let me see.\n<tool_call>\n{LOOK}\n</tool_call>", "Let me see.", [("look", ARGUMENTS)]),
        (HERMES, f"<tool_call>{LOOK}</tool_call>\n<tool_call>{LOOK}</tool_call>", "", [("look", ARGUMENTS)] * 2),
        (HERMES, f"<tool_call>{LOOK}</tool_call> Done.", " Done.", [("look", ARGUMENTS)]),
        (HERMES, f"<tool_call>{LOOK}", "", [("look", ARGUMENTS)]),
        (HERMES, '<tool_call>{"name": "go"}</tool_call>', "", [("go", "{}")]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "go"}</tool_call>', "", [("go", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "go", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("go", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "go", "arguments": {"a": "cut sh', "", [("go", '{"a": "cut sh')]),
        (HERMES, '<tool_call>{"name": "go"}\n</tool_ca', "", [("go", "{}")]),  # cut in its closing mark
        (HERMES, '<tool_call>{"name": "go"}\n</tool_cup', "</tool_cup", [("go", "{}")]),
        (LLAMA3, '{"name": "go", "parameters": {"a": 1}}', "", [("go", '{"a": 1}')]),
        (LLAMA3, '<|python_tag|>{"name": "go", "parameters": {}}', "", [("go", "{}")]),
        (
            LLAMA3,
            '{"name": "go", "parameters": {}}; {"name": "look", "parameters": {}}',
            "",
            [("go", "{}"), ("look", "{}")],
        ),
        (MISTRAL_ARGS, f"Yes.[TOOL_CALLS]look[ARGS]{ARGUMENTS}", "Yes.", [("look", ARGUMENTS)]),
        (MISTRAL_ARGS, '[TOOL_CALLS]go[ARGS]{}[TOOL_CALLS]go[ARGS]{"a": 1}', "", [("go", "{}"), ("go", '{"a": 1}')]),
        (MISTRAL_ARGS, '[TOOL_CALLS] go[ARGS] {"a": "cut [TOOL_CALLS]', "", [("go", '{"a": "cut [TOOL_CALLS]')]),
        (MISTRAL_ARGS, "[TOOL_CALLS]go[ARGS]{} Done.", " Done.", [("go", "{}")]),
        (
            MISTRAL,
            f'[TOOL_CALLS][{LOOK}, {{"name": "go", "arguments": {{}}}}]',
            "",
            [("look", ARGUMENTS), ("go", "{}")],
        ),
    ],
)
def test_calls_are_found(format: CallFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert every_cut(format, text) == (content, calls)
    for _, arguments in calls:
        if "cut" not in arguments:
            json.loads(arguments)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, "Nothing here. a < b, <tool> and <tool_cal"),
        (HERMES, "<tool_call>not JSON</tool_call>"),
        (HERMES, '<tool_call>{"name": "stranger", "arguments": {}}</tool_call> bye'),
        (HERMES, '<tool_call>{"nam": 1'),
        (HERMES, "<tool_call>"),
        (HERMES, '<tool_call>{"arguments": {}}'),
        (HERMES, "  spaces around  "),
        (LLAMA3, '{"answer": 42}'),
        (LLAMA3, 'I say {"name": "go"}'),
        (LLAMA3, "{"),
        (MISTRAL, "[TOOL_CALLS] none"),
        (MISTRAL_ARGS, "[TOOL_CALLS]look at it"),
        (MISTRAL_ARGS, "[TOOL_CALLS]fly[ARGS]{}"),
        (MISTRAL_ARGS, "[TOOL_CALLS]look[ARGS"),
        (GENERIC, '{"name": "go", "arguments": {}}'),
        (HERMES, '<tool_call>{"name": {"a": 1}, "arguments": {}}</tool_call>'),
        (HERMES, "<tool_call>{[1]}</tool_call>"),
    ],
)
def test_what_is_no_call_stays_text(format: CallFormat, text: str) -> None:
    assert every_cut(format, text) == (text, [])


def test_random_texts_lose_nothing_and_raise_nothing() -> None:
    rng = random.Random(5)
    pieces = ["<tool_call>", "</tool_call>", "{", "}", '"', "name", ":", '"name": "go"', ",", "[", "]", "\\", " ", "\n",
              '"arguments": ', "{}", "x", "[TOOL_CALLS]", LOOK, "1"]  # fmt: skip
    for _ in range(3000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(12)))
        for format in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS):
            content, calls = every_cut(format, text) if text else parse(format, [text])
            if not calls:
                assert content == text
            assert all(name in NAMES for name, _ in calls)


@pytest.mark.parametrize("key", ["function", "name"])
def test_the_format_that_we_describe_names_a_function_as_such(key: str) -> None:
    text = f'<tool_call>\n{{"{key}": "look", "arguments": {{"at": 1}}}}\n</tool_call>'
    assert every_cut(GENERIC, text) == ("", [("look", '{"at": 1}')])


def test_content_streams_at_once() -> None:
    parser = CallParser(HERMES, NAMES)
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" wor") == [Content(" wor")]
    assert parser.push("ld<") == [Content("ld")]
    assert parser.push("b>") == [Content("<b>")]


def test_arguments_stream_as_they_come() -> None:
    parser = CallParser(HERMES, NAMES)
    assert parser.push('<tool_call>{"name": "look", "arguments": {"a') == [Begin(0, "look"), Arguments(0, '{"a')]
    assert parser.push('": 1') == [Arguments(0, '": 1')]
    assert parser.push("}}</tool") == [Arguments(0, "}")]


def test_the_template_tells_the_format() -> None:
    assert format_of("… <tool_call> …") is HERMES
    assert format_of("… [TOOL_CALLS] …") is MISTRAL
    assert format_of("… [TOOL_CALLS] … [ARGS] …") is MISTRAL_ARGS
    assert format_of('… "<|python_tag|>" …') is LLAMA3
    assert format_of("{% for m in messages %}…") is GENERIC

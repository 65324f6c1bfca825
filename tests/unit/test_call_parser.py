"""Calls are found however the text is cut, and what is no call is content again, every character."""

from __future__ import annotations

import json
import random

import pytest

from unspool.chat.call_formats import (
    COMMAND,
    DEEPSEEK,
    DEEPSEEK_FENCED,
    GEMMA4,
    GENERIC,
    GLM,
    GLM_FLAT,
    GRANITE3,
    HARMONY,
    HERMES,
    KIMI,
    LFM2,
    LLAMA3,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_IDS,
    NEMOTRON2,
    QWEN_XML,
    SEED,
    TOOL_CALLS,
    CallFormat,
    format_of,
)
from unspool.chat.call_parser import CallParser
from unspool.chat.parts import Arguments, Begin, Content

NAMES = frozenset({"look", "go"})
SCHEMA = {
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "string"}}}},
    "properties": {
        "why": {"type": "string"},
        "num": {"type": "integer"},
        "is": {"type": ["boolean", "null"]},
        "at": {"$ref": "#/$defs/Place"},
        "list": {"type": "array"},
        "any": {},
        "both": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "unit": {"enum": ["C", "F"]},
    },
}


def parse(format: CallFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls, with their arguments joined."""
    parser = CallParser(format, NAMES, {"look": SCHEMA})
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


def xml(*arguments: tuple[str, str], pad: str = "\n") -> str:
    """A call of `look` as Qwen 3 Coder writes it, without the outer marks."""
    written = "".join(f"<parameter={key}>{pad}{value}{pad}</parameter>\n" for key, value in arguments)
    return f"<function=look>\n{written}</function>"


VALUES = [
    ("why", "it's\n\"rain\" </para"), ("num", "3"), ("is", "true"), ("at", '{"x": "\\u00e9"}'), ("list", "[1, [2]]"),
    ("any", "3.5"), ("both", "x"), ("unit", "C"),
]  # fmt: skip
READ = {"why": "it's\n\"rain\" </para", "num": 3, "is": True, "at": {"x": "é"}, "list": [1, [2]], "any": 3.5,
        "both": "x", "unit": "C"}  # fmt: skip
THOUGHT = "I see."


def invoke(*arguments: tuple[str, str]) -> str:
    written = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments)
    return f'<invoke name="look">\n{written}</invoke>'


def glm(line: str, *arguments: tuple[str, str]) -> str:
    written = "".join(f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in arguments)
    return f"<tool_call>look{line}{written}</tool_call>"


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (QWEN_XML, f"<tool_call>\n{xml(*VALUES)}\n</tool_call>"),
        (SEED, f"<seed:tool_call>\n{xml(*VALUES, pad='')}\n</seed:tool_call>"),
        (MINIMAX, f"<minimax:tool_call>\n{invoke(*VALUES)}\n</minimax:tool_call>"),
        (GLM, glm("\n", *VALUES)),
        (GLM_FLAT, glm("", *VALUES)),
        (
            GEMMA4,
            '<|tool_call>call:look{any:3.5,at:{x:<|"|>é<|"|>},both:<|"|>x<|"|>,is:true,list:[1,[2]],num:3,'
            'unit:<|"|>C<|"|>,why:<|"|>it\'s\n"rain" </para<|"|>}<tool_call|>',
        ),
    ],
)
def test_values_get_the_types_of_their_schemas(format: CallFormat, text: str) -> None:
    content, [(name, arguments)] = every_cut(format, f"{THOUGHT}\n{text}")
    assert (content, name, json.loads(arguments)) == (THOUGHT, "look", READ)


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("is", "True", True),
        ("is", "None", None),
        ("num", "many", "many"),  # what is no JSON is told as it is
        ("both", "5", 5),
        ("both", "5.5", "5.5"),
        ("any", "plain words", "plain words"),
        ("any", '"quoted"', '"quoted"'),
        ("why", "5", "5"),
        ("why", "", ""),
        ("why", "\n\nlines\n\n", "\n\nlines\n\n"),
        ("unit", "null", "null"),
        ("list", "['a', {'b': True}]", ["a", {"b": True}]),  # as Python writes it
        ("at", "{'x': __import__('os')}", "{'x': __import__('os')}"),
        ("unknown", '{"a": 1}', {"a": 1}),
    ],
)
def test_a_tagged_value_is_read_by_its_schema(key: str, written: str, value: object) -> None:
    content, [(_, arguments)] = every_cut(QWEN_XML, f"<tool_call>\n{xml((key, written))}\n</tool_call>")
    assert (content, json.loads(arguments)) == ("", {key: value})


ONE = '{"at": [1, {"x": "}\\"]"}]}'


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (QWEN_XML, f"<tool_call>\n{xml()}\n</tool_call>\n<tool_call>\n{xml(('num', '1'))}\n</tool_call>", "",
         [("look", "{}"), ("look", '{"num": 1}')]),
        (QWEN_XML, "<tool_call>\n<function=look>\n<parameter=why>\ncut sh", "", [("look", '{"why": "cut sh')]),
        (QWEN_XML, "<tool_call><function=look><parameter=num>7</parameter></function></tool_call> Done.", " Done.",
         [("look", '{"num": 7}')]),
        (QWEN_XML, "<tool_call>\n<function=look>\n<parameter=num>\n7\n</parameter>\nand so on", "\nand so on",
         [("look", '{"num": 7}')]),
        (GLM, "<tool_call>go\n</tool_call>\n<tool_call>look</tool_call>", "", [("go", "{}"), ("look", "{}")]),
        (MINIMAX, f"Yes.\n<minimax:tool_call>\n{invoke()}\n{invoke(('num', '2'))}\n</minimax:tool_call> So.",
         "Yes. So.",
         [("look", "{}"), ("look", '{"num": 2}')]),
        (GEMMA4, "<|tool_call>call:go{}<tool_call|><|tool_call>call:go{a:[],b:{},c:-1e5,d:None}<tool_call|>", "",
         [("go", "{}"), ("go", '{"a": [], "b": {}, "c": -1e5, "d": null}')]),
        (GEMMA4, '<|tool_call>call:go{<|"|>a b<|"|>:1,c:"x\\"}",d:yes}<tool_call|>', "",
         [("go", '{"a b": 1, "c": "x\\"}", "d": "yes"}')]),
        (GEMMA4, '<|tool_call>call:go{a:<|"|>cut', "", [("go", '{"a": "cut')]),
        (DEEPSEEK, f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{ONE}<｜tool▁call▁end｜>"
         "<｜tool▁call▁begin｜>go<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "",
         [("look", ONE), ("go", "{}")]),
        (DEEPSEEK_FENCED, f"So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{ONE}"
         "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n{}\n```<｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜>", "So.", [("look", ONE), ("go", "{}")]),
        (KIMI, f"<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{ONE}"
         "<|tool_call_end|><|tool_call_begin|>go:12<|tool_call_argument_begin|>{}<|tool_call_end|>"
         "<|tool_calls_section_end|>", "", [("look", ONE), ("go", "{}")]),
        (MISTRAL_IDS, f"[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{ONE}[TOOL_CALLS]go[ARGS]{{}}", "",
         [("look", ONE), ("go", "{}")]),
        (GRANITE3, f'<|tool_call|>[{{"name": "look", "arguments": {ONE}}}, {{"name": "go", "arguments": {{}}}}]', "",
         [("look", ONE), ("go", "{}")]),
        (NEMOTRON2, f'<TOOLCALL>[{{"name": "look", "arguments": {ONE}}}]</TOOLCALL>', "", [("look", ONE)]),
        (TOOL_CALLS, f'<tool_calls>[{{"name": "look", "arguments": {ONE}}}]</tool_calls>', "", [("look", ONE)]),
        (COMMAND, f'<|START_ACTION|>[\n  {{"tool_call_id": "0", "tool_name": "look", "parameters": {ONE}}}\n]'
         "<|END_ACTION|>", "", [("look", ONE)]),
        (LFM2, "<|tool_call_start|>[go(), look(at=[1, -2.5], why='a\nb')]<|tool_call_end|>Wait.", "Wait.",
         [("go", "{}"), ("look", '{"at": [1, -2.5], "why": "a\\nb"}')]),
    ],
)  # fmt: skip
def test_calls_of_each_family_are_found(
    format: CallFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert every_cut(format, text) == (content, calls)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (QWEN_XML, "<tool_call>\n<function=fly>\n</function>\n</tool_call>"),
        (QWEN_XML, "<tool_call>\n<function=look"),
        (QWEN_XML, "<tool_call>\n<function=look>\nplease"),
        (QWEN_XML, "a <function=look> b"),
        (GLM, "<tool_call>lookout</tool_call>"),
        (GLM, "<tool_call>look at"),
        (GEMMA4, "<|tool_call>call:fly{}<tool_call|>"),
        (GEMMA4, "<|tool_call>call:loo"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>fly<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        (KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.fly:0<|tool_call_argument_begin|>{}"),
        (LFM2, "<|tool_call_start|>[look(open('x'))]<|tool_call_end|>"),
        (LFM2, "<|tool_call_start|>[look(at=open('x'))]<|tool_call_end|>"),
        (LFM2, "<|tool_call_start|>[look(at=1"),
        (MINIMAX, '<minimax:tool_call>\n<invoke name="fly">\n</invoke>'),
    ],
)
def test_what_is_no_call_of_a_family_stays_text(format: CallFormat, text: str) -> None:
    assert every_cut(format, text) == (text, [])


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
    for _ in range(500):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(12)))
        for format in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS):
            content, calls = every_cut(format, text) if text else parse(format, [text])
            if not calls:
                assert content == text
            assert all(name in NAMES for name, _ in calls)


FAMILIES = [QWEN_XML, SEED, MINIMAX, GLM, GLM_FLAT, GEMMA4, DEEPSEEK, DEEPSEEK_FENCED, KIMI, MISTRAL_IDS, GRANITE3,
            COMMAND, LFM2]  # fmt: skip


@pytest.mark.parametrize("format", FAMILIES, ids=lambda format: format.name)
def test_random_texts_of_each_family(format: CallFormat) -> None:
    rng = random.Random(format.name)
    call = format.call
    parts = ("parameter", "key_ends", "value_begins", "value_ends", "ends", "name_ends", "begins", "separator")
    pieces = [*format.marks, "look", "go", *"(){}[]=:,\"' \n1</\\", "why", "</", "num", "functions."]
    pieces += [getattr(call, part) for part in parts if getattr(call, part, "")]
    for _ in range(120):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 16)))
        content, calls = every_cut(format, text)
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
    for format, marks in (
        (HARMONY, "<|channel|> <|message|> to="),
        (QWEN_XML, "<tool_call> <function=name>"),
        (GLM, "<tool_call>name\n<arg_key>a</arg_key>\n<arg_value>"),
        (GLM_FLAT, "<tool_call>name<arg_key>a</arg_key><arg_value>"),
        (MINIMAX, "<minimax:tool_call><invoke"),
        (GEMMA4, "<|tool_call>call:"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>"),
        (DEEPSEEK_FENCED, "<｜tool▁calls▁begin｜> ```json"),
        (KIMI, "<|tool_calls_section_begin|>"),
        (MISTRAL_IDS, "[TOOL_CALLS] [CALL_ID] [ARGS]"),
        (GRANITE3, "<|tool_call|>"),
        (LFM2, "<|tool_list_start|>"),
    ):
        assert format_of(marks) is format

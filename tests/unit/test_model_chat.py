"""How a model holds a conversation: what its template shows, prompts with tools, what answers are held to."""

from __future__ import annotations

import random
from typing import Any

import pytest

from unspool.chat.call_formats import GENERIC, HERMES, MISTRAL_ARGS
from unspool.chat.messages import for_template
from unspool.chat.model_chat import ModelChat
from unspool.chat.template import ChatTemplate
from unspool.chat.tools import MAX_SCHEMA_DEPTH, Toolbox, read_toolbox
from unspool.errors import RequestError
from unspool.params import Constraint

BARE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
NAMES = "{% for m in messages %}{{ m.name or m.role }}:{{ m.content }};{% endfor %}"
TOOLS = "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}" + BARE
HELLO = [{"role": "user", "content": "hi"}]
LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
GO: dict[str, Any] = {"type": "function", "function": {"name": "go", "strict": True}}


@pytest.fixture(scope="module")
def tokenizer(tiny: Any) -> Any:
    return tiny().tokenizer()


def text_of(chat: ModelChat, messages: list[dict[str, Any]], *arguments: Any, **more: Any) -> str:
    return chat.tokenizer.decode(chat.prompt(messages, *arguments, **more).ids, skip_special=False)


@pytest.mark.parametrize(
    ("template", "tools", "names", "format"),
    [(BARE, False, False, GENERIC), (NAMES, False, True, GENERIC), (TOOLS, True, False, HERMES)],
)
def test_what_a_template_shows_is_tried(tokenizer: Any, template: str, tools: bool, names: bool, format: Any) -> None:
    chat = ModelChat("m", tokenizer, ChatTemplate(template))
    assert (chat.shows_tools, chat.shows_names, chat.call_format) == (tools, names, format)


def test_tools_go_to_the_template_or_before_the_first_user_message(tokenizer: Any) -> None:
    box = read_toolbox([LOOK])
    shown = ModelChat("m", tokenizer, ChatTemplate(TOOLS))
    assert text_of(shown, HELLO, box) == "<tool_call>lookuser:hi;>"
    assert shown.prompt(HELLO, box).warnings == ()
    described = ModelChat("m", tokenizer, ChatTemplate(BARE))
    text = text_of(described, [{"role": "system", "content": "Be."}, *HELLO], box)
    assert text.startswith("system:Be.;user:You may call functions.")
    assert text.endswith("</tool_call>\n\nhi;>")
    assert '"name": "look"' in text
    assert "no place for tools" in described.prompt(HELLO, box).warnings[0]
    assert text_of(described, HELLO, read_toolbox([LOOK], "none")) == "user:hi;>"


def test_calls_and_results_become_text_where_the_template_has_none(tokenizer: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    result = {"role": "tool", "tool_call_id": "c", "content": "a"}
    history = [*HELLO, {"role": "assistant", "tool_calls": [call]}, result]
    chat = ModelChat("m", tokenizer, ChatTemplate(BARE))
    text = text_of(chat, for_template(history), read_toolbox([LOOK]))
    assert 'assistant:<tool_call>\n{"function": "look", "arguments": {"at": 1}}\n</tool_call>;' in text
    assert "user:<tool_response>\na\n</tool_response>;" in text


def test_developers_are_systems_to_a_template_that_knows_none(tokenizer: Any) -> None:
    message = [{"role": "developer", "content": "Be."}, *HELLO]
    assert text_of(ModelChat("m", tokenizer, ChatTemplate(BARE)), message).startswith("system:Be.;")
    knows = ChatTemplate("{# developer #}" + BARE)
    assert text_of(ModelChat("m", tokenizer, knows), message).startswith("developer:Be.;")


@pytest.mark.parametrize(
    ("template", "messages", "options", "param"),
    [
        (None, HELLO, {}, "messages"),
        (BARE, HELLO, {"messages": []}, "chat_template_kwargs.messages"),
    ],
)
def test_what_cannot_be_rendered_is_refused(
    tokenizer: Any, template: str | None, messages: Any, options: dict[str, Any], param: str
) -> None:
    chat = ModelChat("m", tokenizer, None if template is None else ChatTemplate(template))
    with pytest.raises(RequestError) as refused:
        chat.prompt(messages, Toolbox(), options)
    assert refused.value.param == param


def test_only_what_binds_is_a_constraint(tokenizer: Any) -> None:
    chat, answer = ModelChat("m", tokenizer, ChatTemplate(TOOLS)), Constraint("json_object")
    assert chat.constraint(read_toolbox([LOOK])) is None
    assert chat.constraint(Toolbox(), answer) is answer
    assert chat.constraint(read_toolbox([LOOK, GO], "none"), answer) is answer
    for box in (read_toolbox([LOOK], "required"), read_toolbox([GO])):
        bound = chat.constraint(box)
        assert bound is not None
        assert bound.kind == "grammar"
    with pytest.raises(RequestError, match="a choice constraint and tools"):
        chat.constraint(read_toolbox([LOOK]), Constraint("choice", ["a"]))


def test_schemas_are_bounded() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_SCHEMA_DEPTH):
        schema = {"not": schema}
    with pytest.raises(RequestError, match="nests deeper") as refused:
        read_toolbox([{"function": {"name": "deep", "parameters": {"items": schema}}}])
    assert refused.value.param == "tools[0].parameters"
    with pytest.raises(RequestError, match="characters"):
        read_toolbox([{"function": {"name": "wide", "parameters": {"description": "x" * 70_000}}}])


class OneMark:
    """A vocabulary of characters in which the mark of calls is a control token without text."""

    special_ids = frozenset({0})

    def __init__(self, strips_leading_space: bool = False) -> None:
        self.strips_leading_space = strips_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


WRITTEN = 'So.\0look[ARGS]{"at": "}"}\0look[ARGS]{} then'
READ = ("So. then", [("look", '{"at": "}"}'), ("look", "{}")], 4)


def read(tokenizer: Any, pieces: list[tuple[str, list[int]]]) -> tuple[Any, ...]:
    """The message of an answer whose text and tokens come in pieces."""
    from unspool.chat.answers import AnswerSyntax, Message
    from unspool.events import Token

    syntax = AnswerSyntax(MISTRAL_ARGS, frozenset({"look"}), parallel=True, marks={0: "[TOOL_CALLS]"})
    message = Message(tokenizer, syntax)
    for text, ids in pieces:
        message.push(text, [Token(id) for id in ids])
    message.flush()
    return message.content, [(call.name, call.arguments) for call in message.calls], len(message.pieces)


@pytest.mark.parametrize("strips", [False, True])
def test_an_answer_in_pieces_is_the_same_message_as_the_whole(strips: bool) -> None:
    """Also where a control token begins a call: it has no text, only a place among the tokens. `strips`: the answer's
    first token is a space that is no part of the text, as SentencePiece has it."""
    tokenizer = OneMark(strips)
    ids = [ord(character) for character in (" " + WRITTEN if strips else WRITTEN)]
    rng = random.Random(3)
    for _ in range(60):
        cuts = sorted(rng.randrange(1, len(ids)) for _ in range(rng.randrange(6)))
        pieces = []
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            text = "".join(chr(id) for id in ids[start:end] if id)
            pieces.append((text[1:] if strips and start == 0 else text, ids[start:end]))
        assert read(tokenizer, pieces) == READ


def test_a_mark_finds_its_place_where_text_comes_before_its_token() -> None:
    """Of a token of several characters the first may be out while the others could still become a stop string."""

    words = {0: "", 1: "So", 2: ".", 3: 'look[ARGS]{"at": "}"}', 4: "look[ARGS]{}", 5: " then"}

    class Words(OneMark):
        def token_bytes(self, token_id: int) -> bytes:
            return words[token_id].encode()

    pieces: list[tuple[str, list[int]]] = [("S", []), ("o.", [1, 2]), ('look[ARGS]{"at": "', [0])]
    pieces += [('}"}', [3, 0]), ("look[ARGS]{}", [4]), (" then", [5])]
    assert read(Words(), pieces) == READ

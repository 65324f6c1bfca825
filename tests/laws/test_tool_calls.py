"""Law: an answer read as it streams is the message that its whole text is, whatever runs beside it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from unspool.chat.answers import Message
from unspool.chat.tools import read_toolbox
from unspool.events import Token
from unspool.llm import LLM
from unspool.params import Constraint, SamplingParams
from unspool.text.assembler import TextAssembler

TEMPLATES = {
    "hermes": "{# <tool_call> #}",
    "llama3": "{# <|python_tag|> #}",
    "mistral": "{# [TOOL_CALLS] #}",
    "mistral, newer": "{# [TOOL_CALLS] [ARGS] #}",
}
BODY = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}>"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]
PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "look", "go", "{}", "[", "]", ", ", ";",
    '{"name": "look", "arguments": {"at": "}\\"]"}}', '{"name": "go", "parameters": {}}', '{"name": "x"', '"', "\n",
    '[TOOL_CALLS]look[ARGS]{"at": "}"}', '<tool_call>\n{"name": "go"}\n</tool_call>', "é☃", "So.", " ",
]  # fmt: skip


def summary(message: Message) -> Any:
    return message.content, [(call.name, call.arguments) for call in message.calls], len(message.pieces)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_streams_message_is_the_wholes(tiny: Any, name: str) -> None:
    rng = random.Random(name)
    checkpoint = replace(tiny(), chat_template=TEMPLATES[name] + BODY)
    with LLM(checkpoint, device="cpu", threads=1, kv_tokens=8192) as llm:
        syntax = llm.model_chat.syntax(read_toolbox(TOOLS))
        streams = []
        for _ in range(24):
            text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 12)))
            params = SamplingParams(constraint=Constraint("choice", [text]), max_tokens=400)
            streams.append((text, llm.stream([{"role": "user", "content": "hi"}], params, tools=TOOLS)))
        num_calls = 0
        for text, stream in streams:
            result = stream.result()
            assert result.text == text
            whole = Message(llm.tokenizer, syntax)
            whole.push(result.text, result.tokens)
            whole.flush()
            (streamed,) = stream.messages
            assert summary(streamed) == summary(whole)
            assert result.content == whole.content
            num_calls += len(result.tool_calls)
    assert num_calls > 2


def test_where_one_call_ends_an_answer_does_not_depend_on_how_many_tokens_come_at_once(tiny: Any) -> None:
    rng = random.Random(5)
    checkpoint = replace(tiny(), chat_template=TEMPLATES["hermes"] + BODY)
    num_cut = 0
    with LLM(checkpoint, device="cpu", threads=1, kv_tokens=512) as llm:
        syntax = llm.model_chat.syntax(read_toolbox(TOOLS, parallel=False))
        for _ in range(60):
            text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 12)))
            tokens = [Token(id) for id in llm.encode(text)]
            pieces = TextAssembler(llm.tokenizer)
            ones = [pieces.push(token)[:2] for token in tokens] + [pieces.flush()[:2]]
            found = []
            for _ in range(4):
                message, taken, at = Message(llm.tokenizer, syntax), [], 0
                while at < len(ones):
                    step = rng.choice([1, 1, 2, 5, 50])
                    group, at = ones[at : at + step], at + step
                    if not message.is_full:
                        given = [token for _, some in group for token in some]
                        taken += message.take("".join(more for more, _ in group), given)[1]
                message.flush()
                found.append((message.text, taken, summary(message)))
            assert found == found[:1] * 4
            num_cut += message.is_full and message.text != text
    assert num_cut > 5

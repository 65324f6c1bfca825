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
    "qwen-xml": "{# <tool_call> <function= #}",
    "glm": "{# <tool_call> <arg_key> #}",
    "gemma": "{# <|tool_call> call: #}",
    "deepseek": "{# <｜tool▁calls▁begin｜> #}",
    "lfm2": "{# <|tool_call_start|> #}",
    "harmony": "{# <|channel|> <|message|> to= #}",
}
BODY = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}>"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]
COMMON = ["look", "go", "{}", "[", "]", ", ", ";", '"', "\n", "é☃", "So.", " "]
HERMES = ["<tool_call>", "</tool_call>", '{"name": "look", "arguments": {"at": "}\\"]"}}', '{"name": "x"',
          '<tool_call>\n{"name": "go"}\n</tool_call>']  # fmt: skip
ARRAY = ["[TOOL_CALLS]", '[TOOL_CALLS][{"name": "go"}]', "[ARGS]",
         '[TOOL_CALLS]look[ARGS]{"at": "}"}', '{"name": "go", "parameters": {}}', *HERMES]  # fmt: skip
PIECES = {
    "hermes": HERMES,
    "llama3": ["<|python_tag|>", '{"name": "go", "parameters": {}}', *HERMES],
    "mistral": ARRAY,
    "mistral, newer": ARRAY,
    "qwen-xml": ["<tool_call><function=look>", "<parameter=at>\nx\n</parameter>", "</function>", "</tool_call>",
                 "<tool_call><function=go></function></tool_call>"],
    "glm": ["<tool_call>go", "<arg_key>at</arg_key>", "<arg_value>1</arg_value>", "</tool_call>",
            "<tool_call>look\n</tool_call>"],
    "gemma": ['<|tool_call>call:look{at:<|"|>}', '<|"|>', "}<tool_call|>", "<|tool_call>call:go{}<tool_call|>"],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>look<｜tool▁sep｜>{", "}<｜tool▁call▁end｜>"],
    "lfm2": ["<|tool_call_start|>[look(at='x'", ")]<|tool_call_end|>", "<|tool_call_start|>[go()]"],
    "harmony": ["<|channel|>commentary to=functions.look<|message|>{}<|call|>", "<|start|>assistant",
                "<|channel|>analysis<|message|>Hm.<|end|>", "<|channel|>final<|message|>"],
}  # fmt: skip


def random_text(rng: random.Random, name: str) -> str:
    """Two thirds of its pieces are the format's own."""
    return "".join(rng.choice(COMMON if rng.random() < 0.35 else PIECES[name]) for _ in range(rng.randrange(1, 12)))


def summary(message: Message) -> Any:
    return message.content, [(call.name, call.arguments) for call in message.calls], len(message.pieces)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_streams_message_is_the_wholes(tiny: Any, name: str) -> None:
    rng = random.Random(name)
    checkpoint = replace(tiny(), chat_template=TEMPLATES[name] + BODY)
    with LLM(checkpoint, device="cpu", threads=1, kv_tokens=8192) as llm:
        syntax = llm.model_chat.syntax(read_toolbox(TOOLS))
        streams = []
        for _ in range(20):
            text = random_text(rng, name)
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
            text = random_text(rng, "hermes")
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

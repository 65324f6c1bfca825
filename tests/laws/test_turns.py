"""The second turn of a chat computes only what follows the last common boundary, in models whose layers have states or
windows too; where a template leaves out what was thought, the answer without it is read again and nothing before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unspool.llm import LLM
from unspool.models.random import NUM_BYTES, SHAPES, random_checkpoint
from unspool.params import Constraint

RECURRENT = ("tiny-lfm2", "tiny-qwen3.5", "tiny-granite-hybrid", "tiny-nemotron-h")
BLOCK = 8
WINDOWED = ("tiny-gemma3", "tiny-gpt-oss", "tiny-mistral")  # windows of 24 tokens, in some layers or all
MARK = "<|endoftext|>"  # before every message
# As templates of thinking models: what was thought, here before a bar, is left out of earlier answers, and the answer
# under way begins inside of it. (With the marks of real ones a constraint would not bind what is thought.)
TEMPLATE = (
    "{%- for message in messages -%}" + MARK + "{{ message.role }}:"
    "{{ message.content.split('|')[-1] }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}" + MARK + "assistant:({%- endif -%}"
)
QUESTION = "What follows from this text, which is longer than any window? " * 2
THOUGHT = Constraint("regex", "[a-d]{30}[|][e-h]{12}")
PLAIN = Constraint("regex", "[e-h]{30}")


def llm_of(shape: str, template: str = TEMPLATE, **options: Any) -> LLM:
    checkpoint = random_checkpoint(replace(SHAPES[shape], context_length=1024))
    checkpoint = replace(checkpoint, chat_template=template)
    return LLM(checkpoint, device="cpu", threads=1, kv_tokens=2048, block_size=BLOCK, **options)


def two_turns(llm: LLM, constraint: Constraint) -> tuple[list[int], list[int], Any]:
    """The first prompt with its answer, the second prompt, and what came of it."""
    messages = [{"role": "user", "content": QUESTION}]
    first = llm.chat(messages, constraint=constraint, seed=1, max_tokens=60)
    ids = [token.id for token in first.choices[0].tokens]
    answer, asked = llm.decode(ids), [*llm.render(messages), *ids]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    return asked, llm.render(messages), llm.chat(messages, seed=2, max_tokens=8, ignore_eos=True)


def num_common(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("shape", [*RECURRENT, *WINDOWED])
def test_an_appended_turn_reads_what_is_new(shape: str) -> None:
    template = TEMPLATE.replace("assistant:(", "assistant:")
    with llm_of(shape, template) as llm:
        asked, second, result = two_turns(llm, PLAIN)
        common = num_common(asked, second)
        assert common >= len(asked) - 1, "the template gives the answer back as it was"
        left = len(asked) - result.usage.cached_tokens
        assert left <= (2 if shape in RECURRENT else 1 + BLOCK), "without states, an answer's last block is not kept"
    check_bits(shape, template, second, result)


@pytest.mark.parametrize("shape", [*RECURRENT, *WINDOWED])
def test_a_turn_without_its_thoughts_reads_the_answer_again_and_nothing_before_it(shape: str) -> None:
    with llm_of(shape) as llm:
        asked, second, result = two_turns(llm, THOUGHT)
        common, boundary = num_common(asked, second), last_mark(asked)
        assert boundary <= common < len(asked) - 40, "the prompts part where the thought began"
        assert boundary <= result.usage.cached_tokens <= common
        assert result.usage.prompt_tokens == len(second)
    check_bits(shape, TEMPLATE, second, result)


def last_mark(asked: list[int]) -> int:
    """Where the answer's message begins."""
    return max(at for at, token in enumerate(asked) if token == NUM_BYTES)


def check_bits(shape: str, template: str, prompt: list[int], result: Any) -> None:
    """The same answer where nothing is remembered."""
    with llm_of(shape, template, prefix_cache=False) as llm:
        fresh = llm.generate(prompt, seed=2, max_tokens=8, ignore_eos=True)
    assert fresh.usage.cached_tokens == 0
    assert fresh.choices[0].tokens == result.choices[0].tokens

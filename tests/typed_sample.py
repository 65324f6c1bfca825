"""Code of a user's that type checkers read and nobody runs: `make lint` has mypy read it, `make test-clients` pyright.

A line that ends in `type: ignore` has a mistake; a checker that does not find it complains about the comment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

from unspool import (
    LLM,
    PRESETS,
    AsyncLLM,
    AsyncStream,
    DraftContext,
    Event,
    Finished,
    Result,
    SamplingParams,
    StageState,
    StopState,
    Stream,
    Text,
    Token,
    ToolCall,
)

MESSAGES = [{"role": "user", "content": "Bob is 47."}]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@dataclass
class Person:
    name: str
    age: int


def answers(llm: LLM, many: list[str], ids: list[list[int]], mixed: list[str | Sequence[int]]) -> None:
    assert_type(llm.generate("hi", max_tokens=3), Result[Any])
    assert_type(llm.generate([1, 2]), Result[Any])
    assert_type(llm.generate("hi", {"max_tokens": 3}), Result[Any])
    assert_type(llm.generate(mixed, [SamplingParams(), SamplingParams()]), list[Result[Any]])
    assert_type(llm.generate(many, progress=False), list[Result[Any]])
    assert_type(llm.generate(ids), list[Result[Any]])
    assert_type(llm.chat(MESSAGES, tools=TOOLS, tool_choice="required"), Result[Any])
    assert_type(llm.chat([MESSAGES, MESSAGES], temperature=0), list[Result[Any]])
    assert_type(llm.score("hi"), list[Token | None])
    assert_type(llm.encode("hi"), list[int])
    result = llm.generate("hi")
    assert_type(result.text, str)
    assert_type(result.logprobs, list[float] | None)
    assert_type(result.tool_calls, tuple[ToolCall, ...])
    assert_type(llm.fork(result, 0, top_p=0.5), Result[Any])


def values(llm: LLM) -> None:
    assert_type(llm.generate("hi", schema=Person).parsed, Person)
    assert_type(llm.chat(MESSAGES, schema=Person, max_tokens=9).parsed, Person)
    assert_type(llm.chat([MESSAGES], schema=Person)[0].parsed, Person)
    assert_type(llm.chat(MESSAGES, schema={"type": "object"}), Result[Any])


def streams(llm: LLM) -> None:
    stream = llm.stream(MESSAGES, tools=TOOLS, max_tokens=3)
    assert_type(stream, Stream)
    for event in stream:
        assert_type(event, Event)
        if isinstance(event, Text):
            assert_type(event.text, str)
        elif isinstance(event, Finished):
            assert_type(event.usage.completion_tokens, int)


async def loops(llm: AsyncLLM) -> None:
    assert_type(await llm.generate("hi"), Result[Any])
    assert_type(await llm.generate(["hi"], schema=Person), list[Result[Person]])
    assert_type((await llm.chat(MESSAGES, schema=Person)).parsed, Person)
    assert_type(llm.stream("hi"), AsyncStream)


def stage(row: NDArray[np.float32], state: StageState) -> NDArray[np.float32]:
    return row if state.output_ids.size else row * np.float32(2)


class Rule:
    def __call__(self, state: StopState) -> bool:
        return state.text.endswith(".")


class Drafts:
    def propose(self, contexts: Sequence[DraftContext], counts: Sequence[int]) -> list[list[int]]:
        return [list(context.tokens[-1:]) for context in contexts]

    def seconds(self, count: int) -> float:
        return 0.0

    def forget(self, number: int) -> None: ...


def own(llm: LLM) -> None:
    LLM(speculate=Drafts(), device="cpu")
    llm.generate("hi", order=[stage, *PRESETS["unspool"].stages], stop_rules=[Rule(), lambda state: not state.text])
    SamplingParams(order=["temperature", stage], stop_rules=Rule())


def mistakes(llm: LLM) -> None:
    LLM(thread=2)  # type: ignore
    LLM(device="tpu")  # type: ignore
    LLM(speculate=Rule())  # type: ignore
    llm.generate("hi", max_token=3)  # type: ignore
    llm.generate("hi", {"max_token": 3})  # type: ignore
    llm.generate("hi", temperature="hot")  # type: ignore
    llm.generate(5)  # type: ignore
    llm.chat("hi")  # type: ignore
    llm.chat(MESSAGES, tool=[])  # type: ignore
    llm.generate("hi", stop_rules=[stage])  # type: ignore
    print(llm.generate("hi", schema=Person).parsed.nam)  # type: ignore
    SamplingParams(order=[5])  # type: ignore

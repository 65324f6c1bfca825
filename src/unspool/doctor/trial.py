"""Running the model briefly: does it stop, does it repeat itself, does a tool call parse?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from unspool.doctor.finding import Finding
from unspool.errors import ParseError
from unspool.params import RepetitionDetector, SamplingParams

if TYPE_CHECKING:
    from unspool.llm import LLM
    from unspool.results import Completion, Result

QUESTIONS = ("Say hello in one short sentence.", "What is two plus two?", "Name one colour.")
LIMIT = 256  # tokens: ten times what these questions need
CALL_LIMIT = 96  # of a call: three times what it needs
PERIOD, REPEATS = 64, 4
TOOL_QUESTIONS = ("What is the weather in Oslo? Use the tool.", "Use the tool to find the weather in Cairo.")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now.",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string", "description": "The city's name."}},
            "required": ["city"],
        },
    },
}  # fmt: skip
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def run_trial(llm: LLM) -> Iterator[Finding]:
    """Three short chats, greedy and sampled, and requests for a tool, freely and bound to a call. A model without a
    chat template only continues text: nothing is asked."""
    if llm.checkpoint.chat_template is None:
        yield Finding(
            "trial-needs-template", "note", "certain", "there is no chat template, so no chat could be tried",
            "the model continues text; it is not made for conversations", "use generate, or `run --raw`",
        )  # fmt: skip
        return
    answers = []
    for temperature in (0.0, 0.7):
        params = SamplingParams(
            max_tokens=LIMIT, temperature=temperature, seed=7,
            repetition_detector=RepetitionDetector(PERIOD, REPEATS, length=48),
        )  # fmt: skip
        answers += [llm.chat([{"role": "user", "content": question}], params).choices[0] for question in QUESTIONS]
    yield from judge(answers)
    yield from try_tools(llm)


def judge(answers: list[Completion]) -> Iterator[Finding]:
    endless = sum(answer.finish_reason == "length" for answer in answers)
    loops = sum(answer.finish_reason == "repetition" for answer in answers)
    if endless > len(answers) // 2:
        yield Finding(
            "trial-does-not-stop", "error", "likely",
            f"{endless} of {len(answers)} answers to short questions had not ended after {LIMIT} tokens",
            "answers go on until their limit", "see the findings on end tokens and the template; is it a base model?",
        )  # fmt: skip
    elif endless:
        yield Finding(
            "trial-long-answers", "note", "possible",
            f"{endless} of {len(answers)} answers to short questions had not ended after {LIMIT} tokens",
            "the model is talkative", "set max_tokens",
        )  # fmt: skip
    if loops:
        yield Finding(
            "trial-repeats", "error" if loops > len(answers) // 2 else "warning" if loops > 1 else "note", "likely",
            f"{loops} of {len(answers)} answers repeat a passage of up to {PERIOD} tokens {REPEATS} times",
            "answers get stuck in a loop",
            "raise the temperature, or use the DRY or repetition penalty; see the finding on quantization, if any",
        )  # fmt: skip


def try_tools(llm: LLM) -> Iterator[Finding]:
    """Whether the model calls a tool when asked to, and whether a call that it is bound to can be read."""
    detector = RepetitionDetector(PERIOD, REPEATS, length=48)
    params = SamplingParams(max_tokens=CALL_LIMIT, temperature=0, repetition_detector=detector)
    chats = [[{"role": "user", "content": question}] for question in TOOL_QUESTIONS]
    free = [llm.chat(chat, params, tools=[TOOL]) for chat in chats]
    bound = llm.chat(chats[0], params, tools=[TOOL], tool_choice=NAMED)
    yield from judge_calls(free, bound, shows_tools=llm.model_chat.shows_tools)


def judge_calls(free: list[Result], bound: Result, *, shows_tools: bool) -> Iterator[Finding]:
    failed = [result for result in free if not has_call(result)]
    if failed:
        wrote = failed[0].text.strip()
        yield Finding(
            "trial-no-tool-call", "warning" if shows_tools else "note", "possible",
            f"{len(failed)} of {len(free)} answers to a request for a tool have no call that can be read; one begins "
            f"{wrote[:60]!r}",
            "tools are not called, or their calls come as text",
            "ask with tool_choice, which binds the answer to the call's form"
            + ("" if shows_tools else "; the model was not trained for tools"),
        )  # fmt: skip
    if not has_call(bound):
        yield Finding(
            "trial-call-broken", "warning" if bound.finish_reason == "length" else "error", "likely",
            f"an answer that is bound to a call cannot be read as one; it ended by {bound.finish_reason} with "
            f"{bound.text[-60:]!r}",
            "requests with tool_choice fail", "see the findings on the template and the vocabulary",
        )  # fmt: skip


def has_call(result: Result) -> bool:
    """Whether there is a call of the tool with a city."""
    for call in result.tool_calls:
        try:
            if call.name == "get_weather" and isinstance(call.values.get("city"), str):
                return True
        except ParseError:
            continue
    return False

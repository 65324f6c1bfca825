"""Running the model briefly: does it stop, does it repeat itself?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from unspool.doctor.finding import Finding
from unspool.params import RepetitionDetector, SamplingParams

if TYPE_CHECKING:
    from unspool.llm import LLM
    from unspool.results import Completion

QUESTIONS = ("Say hello in one short sentence.", "What is two plus two?", "Name one colour.")
LIMIT = 256  # tokens: ten times what these questions need
PERIOD, REPEATS = 64, 4


def run_trial(llm: LLM) -> Iterator[Finding]:
    """Three short chats, greedy and sampled. A model without a chat template only continues text: nothing is asked."""
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

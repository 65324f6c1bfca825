"""The library's surface: LLM and AsyncLLM answer alike, take parameters in every form, and refuse by name."""

from __future__ import annotations

import asyncio
import inspect
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from tests.brake import Brake
from unspool.async_llm import AsyncLLM
from unspool.bench.synthetic import fix_length
from unspool.config import EngineConfig
from unspool.drafter import Draft, DraftContext
from unspool.errors import ContextLengthError, EngineClosedError, ModelError, RequestError
from unspool.events import Finished, Text
from unspool.llm import LLM
from unspool.models.checkpoint import Checkpoint
from unspool.options import EngineOptions, SamplingOptions
from unspool.params import SamplingParams, rules
from unspool.results import Result

PROMPT = [5, 6, 7, 8, 9]
HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% if calm %}<s>be calm</s>{% endif %}{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "<s>assistant:"
)
SAMPLED = {"max_tokens": 8, "temperature": 0.9, "seed": 4, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(scope="module")
def checkpoint(tiny: Callable[..., Checkpoint]) -> Checkpoint:
    return replace(tiny("tiny"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(checkpoint, device="cpu", threads=1, kv_tokens=512, block_size=4) as llm:
        yield llm
        llm.driver.call(lambda engine: engine.check())


def bits(result: Result) -> list[Any]:
    return [
        (
            choice.text,
            choice.finish_reason,
            [(token.id, struct.pack("<d", token.logprob or 0)) for token in choice.tokens],
        )
        for choice in result.choices
    ]


# Parameters ---------------------------------------------------------------------------------------------------------
def test_parameters_in_every_form_are_the_same(llm: LLM) -> None:
    expected = bits(llm.generate(PROMPT, SamplingParams(**SAMPLED)))
    assert bits(llm.generate(PROMPT, **SAMPLED)) == expected
    assert bits(llm.generate(PROMPT, dict(SAMPLED))) == expected  # type: ignore[call-overload]
    assert bits(llm.generate(PROMPT, SamplingParams(**{**SAMPLED, "seed": 9}), seed=4)) == expected
    assert bits(llm.generate([PROMPT], [{**SAMPLED, "seed": 9}], seed=4)[0]) == expected  # type: ignore[call-overload]
    assert bits(llm.stream(PROMPT, **SAMPLED).result()) == expected
    assert len(llm.chat(HELLO, max_tokens=3, ignore_eos=True).token_ids) == 3
    forked = llm.fork(llm.generate(PROMPT, **SAMPLED), 2, max_tokens=4)
    assert forked.token_ids == llm.generate(PROMPT, **SAMPLED).token_ids[:4]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda llm: llm.generate(PROMPT, max_token=3),
            "unknown sampling parameter 'max_token'; did you mean 'max_tokens'?",
        ),
        (lambda llm: llm.chat(HELLO, foo="bar"), "unknown sampling parameter 'foo'; known: allowed_token_ids, "),
        (lambda llm: llm.stream(PROMPT, {"temprature": 0}), "did you mean 'temperature'"),
        (lambda llm: llm.generate(PROMPT, top_p=2), "top_p is 2; allowed: above 0 and up to 1"),
        (lambda llm: llm.generate(PROMPT, 7), "params is 7; allowed: SamplingParams, or a dictionary of its fields"),
        (lambda llm: llm.generate([PROMPT] * 2, [SamplingParams()]), "2 prompts and 1 params"),
        (lambda llm: llm.generate(5), "a prompt is a text or a sequence of token ids, not 5"),
        (lambda llm: llm.generate(None), "a prompt is a text or a sequence of token ids, not None"),
        (lambda llm: llm.generate([5, None]), r"prompt\[1\] is None; a token id is an integer"),
        (lambda llm: llm.generate([PROMPT, 5]), "a prompt is a text or a sequence of token ids, not 5"),
        (lambda llm: llm.generate(b"hi"), "not b'hi'"),
        (lambda llm: llm.generate({"prompt": "hi"}), "not {'prompt': 'hi'}"),
        (lambda llm: llm.generate(HELLO), "not {'role': 'user', 'content': 'hello'}; a conversation goes to chat"),
        (lambda llm: llm.generate([True, False]), "a prompt is a text or a sequence of token ids, not True"),
        (lambda llm: llm.generate([]) or llm.generate(""), "the prompt has no tokens"),
        (lambda llm: llm.chat("hello"), "messages: expected a list of messages, got str"),
        (lambda llm: llm.chat([]), "messages: must not be empty"),
        (lambda llm: llm.stream("hi", template_options={"calm": True}), "template_options are for a conversation"),
        (lambda llm: llm.score(None), "a prompt is a text or a sequence of token ids, not None"),
        (lambda llm: llm.fork(llm.generate(PROMPT, max_tokens=2), 3), "index is 3; the answer has"),
        (lambda llm: llm.fork(llm.generate(PROMPT, max_tokens=2), 0, choice=1), "choice is 1; the result has 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(llm: LLM, ask: Callable[[LLM], object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ask(llm)


def test_token_ids_may_be_numpys(llm: LLM) -> None:
    params = SamplingParams(**SAMPLED)
    expected = bits(llm.generate(PROMPT, params))
    assert bits(llm.generate(np.array(PROMPT), params)) == expected  # type: ignore[call-overload]
    assert bits(llm.generate(tuple(PROMPT), params)) == expected
    many = llm.generate([np.array(PROMPT), "hello"], params)  # type: ignore[call-overload]
    assert bits(many[0]) == expected


def test_template_options_reach_the_template_or_are_told_of(llm: LLM) -> None:
    plain = llm.chat(HELLO, max_tokens=1)
    calm = llm.chat(HELLO, max_tokens=1, template_options={"calm": True})
    assert len(calm.prompt_ids) > len(plain.prompt_ids)
    assert calm.warnings == plain.warnings == ()
    assert list(calm.prompt_ids) == llm.render(HELLO, template_options={"calm": True})
    other = llm.chat(HELLO, max_tokens=1, template_options={"loud": True})
    assert other.prompt_ids == plain.prompt_ids
    assert other.warnings == ("the model's chat template does not read loud: it has no effect",)
    streamed = llm.stream(HELLO, max_tokens=1, template_options={"calm": True})
    assert streamed.prompt_ids == calm.prompt_ids


# Answers ------------------------------------------------------------------------------------------------------------
def test_a_stream_is_what_generate_returns(llm: LLM) -> None:
    whole = llm.generate(PROMPT, **SAMPLED)
    with llm.stream(PROMPT, **SAMPLED) as stream:
        events = list(stream)
    texts = [event for event in events if isinstance(event, Text)]
    assert isinstance(events[-1], Finished)
    assert "".join(text.text for text in texts) == whole.text
    assert tuple(token for text in texts for token in text.tokens) == whole.tokens
    assert bits(stream.result()) == bits(whole)
    assert stream.params.seed == 4


def test_a_result_prints_as_its_answers(llm: LLM) -> None:
    result = llm.generate(PROMPT, SAMPLED, n=2)
    first, second = (
        f"Completion({choice.text!r}, 8 tokens, finish_reason='length', seed={choice.seed})"
        for choice in result.choices
    )
    assert repr(result) == f"Result({first}, {second})"


def test_chat_is_generate_on_the_rendered_conversation(llm: LLM) -> None:
    assert bits(llm.chat(HELLO, **SAMPLED)) == bits(llm.generate(llm.render(HELLO), **SAMPLED))
    assert bits(llm.stream(HELLO, **SAMPLED).result()) == bits(llm.chat(HELLO, **SAMPLED))


def test_scores_are_what_generating_tells(llm: LLM) -> None:
    result = llm.generate(PROMPT, max_tokens=6, temperature=0, logprobs=3, ignore_eos=True)
    scored = llm.score([*PROMPT, *result.token_ids], top=3)
    assert scored[0] is None
    assert scored[len(PROMPT) :] == list(result.tokens)


def test_a_fork_goes_on_as_if_its_tokens_had_been_chosen(llm: LLM) -> None:
    result = llm.generate(PROMPT, **SAMPLED)
    assert llm.fork(result, 3).token_ids == result.token_ids
    other = (result.token_ids[3] + 1) % 200
    forked = llm.fork(result, 3, other)
    assert forked.token_ids[:4] == [*result.token_ids[:3], other]
    assert len(forked.token_ids) == 8


def test_a_saved_state_is_found_by_another_process(checkpoint: Checkpoint, llm: LLM, tmp_path: Path) -> None:
    prompt = list(range(40, 62))
    assert llm.save_state(tmp_path / "state", prompt) == 20
    expected = llm.generate(prompt, **SAMPLED)
    with LLM(checkpoint, device="cpu", threads=1, kv_tokens=512, block_size=4) as other:
        assert other.load_state(tmp_path / "state") == 20
        result = other.generate(prompt, **SAMPLED)
        assert result.usage.cached_tokens >= 20
        assert bits(result) == bits(expected)
        chat = other.save_state(tmp_path / "chat", HELLO)
        assert chat == len(other.render(HELLO)) // 4 * 4
    (tmp_path / "bad").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="is not a saved state"):
        llm.load_state(tmp_path / "bad")


def test_a_state_that_the_cache_does_not_keep_is_no_silent_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with (
        LLM(checkpoint, device="cpu", threads=1, kv_tokens=64, block_size=4, prefix_cache=False) as llm,
        pytest.raises(RequestError, match="prefix_cache is off"),
    ):
        llm.save_state(tmp_path / "state", PROMPT)
    assert not (tmp_path / "state").exists()


def test_a_closed_model_refuses(checkpoint: Checkpoint) -> None:
    llm = LLM(checkpoint, device="cpu", threads=1, kv_tokens=64)
    llm.close()
    for ask in (lambda: llm.generate(PROMPT), lambda: llm.stream(PROMPT), lambda: llm.score(PROMPT)):
        with pytest.raises(EngineClosedError):
            ask()


# AsyncLLM -----------------------------------------------------------------------------------------------------------
def test_async_answers_are_the_same(checkpoint: Checkpoint, llm: LLM, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(checkpoint, device="cpu", threads=1, kv_tokens=512, block_size=4) as other:
            found = await asyncio.gather(*(other.generate(PROMPT, {**SAMPLED, "seed": seed}) for seed in range(6)))
            alone = [llm.generate(PROMPT, {**SAMPLED, "seed": seed}) for seed in range(6)]
            assert [bits(result) for result in found] == [bits(result) for result in alone]
            assert [bits(r) for r in await other.generate([PROMPT, "hi"], **SAMPLED)] == [
                bits(r) for r in llm.generate([PROMPT, "hi"], **SAMPLED)
            ]
            assert bits(await other.chat(HELLO, **SAMPLED)) == bits(llm.chat(HELLO, **SAMPLED))
            assert await other.score(PROMPT, 2) == llm.score(PROMPT, 2)
            result = await other.generate(PROMPT, **SAMPLED)
            assert bits(await other.fork(result, 3, 7)) == bits(llm.fork(result, 3, 7))
            texts = [event.text async for event in other.stream(HELLO, **SAMPLED) if isinstance(event, Text)]
            assert "".join(texts) == llm.chat(HELLO, **SAMPLED).text
            assert await other.save_state(tmp_path / "state", list(range(30))) == 28
            assert await other.load_state(tmp_path / "state") == 28
            with pytest.raises(RequestError, match="not 5"):
                await other.generate(5)  # type: ignore[call-overload]
        with pytest.raises(EngineClosedError):
            await other.generate(PROMPT)

    asyncio.run(main())


def test_a_cancelled_task_aborts_its_request(checkpoint: Checkpoint) -> None:
    async def main() -> None:
        async with AsyncLLM(checkpoint, device="reference", kv_tokens=512, block_size=4) as llm:
            with Brake(llm.engine):
                task = asyncio.create_task(llm.generate(PROMPT, max_tokens=400, ignore_eos=True))
                while not await llm.driver.call_async(lambda engine: engine.has_work):
                    await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                while await llm.driver.call_async(lambda engine: engine.has_work):
                    await asyncio.sleep(0.001)
            assert llm.engine.finished["abort"] == 1

    asyncio.run(main())


def test_both_have_the_same_methods_and_arguments() -> None:
    def surface(kind: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(one).parameters) for name, one in methods if not name.startswith("_")}

    sync, other = surface(LLM), surface(AsyncLLM)
    del sync["close"], other["aclose"]
    assert sync == other


# Engine options -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'; allowed: auto, cpu, cuda, reference"),
        ({"isa": "sse"}, "isa is 'sse'; allowed: auto, avx512, avx2, plain"),
        ({"kv_dtype": "q4"}, "kv_dtype is 'q4'; allowed: auto, q8, f16, f32"),
        ({"quantize": "int3"}, "quantize is 'int3'; allowed: none, fp8, int8, int4"),
        ({"kv_tokens": "1k"}, "kv_tokens is '1k'; allowed: an integer from 1 to 1,099,511,627,776"),
        ({"kv_tokens": 0}, "kv_tokens is 0; allowed: an integer from 1 to "),
        ({"kv_tokens": 10}, r"kv_tokens is 10; allowed: at least one block, which is 32 tokens"),
        ({"threads": 1.5}, "threads is 1.5; allowed: an integer from 1 to 4,096"),
        ({"threads": True}, "threads is True; allowed: an integer from 1 to 4,096"),
        ({"prefix_cache": "no"}, "prefix_cache is 'no'; allowed: true or false"),
        ({"gpu_memory": "16GB"}, "gpu_memory is '16GB'; allowed: above 0 and up to 1"),
        ({"gpu_memory": 16}, "gpu_memory is 16; allowed: above 0 and up to 1"),
        ({"block_size": -1}, "block_size is -1; allowed: an integer from 0 to 65,536"),
        ({"threads": 10**12}, "threads is 1000000000000; allowed: an integer from 1 to 4,096"),
        ({"kv_tokens": 10**30}, "kv_tokens is 10+; allowed: an integer from 1 to"),
        ({"block_size": 10**12}, "block_size is 1000000000000; allowed: an integer from 0 to 65,536"),
        ({"step_tokens": 2**63}, "step_tokens is 9223372036854775808; allowed: an integer from 0 to 16,777,216"),
        ({"max_running": 0}, "max_running is 0; allowed: an integer from 1 to 1,048,576"),
        ({"max_waiting": None}, "max_waiting is None; allowed: an integer from 1 to 2,147,483,647"),
        ({"speculate": "guess"}, r"'guess'; allowed: lookup, model:PATH, early-exit\[:LAYERS\], mtp, auto"),
        ({"speculate": "model:"}, "speculate is 'model:'"),
        ({"speculate": "early-exit:x"}, "speculate is 'early-exit:x'"),
        ({"speculate": 3}, "speculate is 3; allowed: .*an object with a drafter's methods"),
        ({"thread": 2}, "unknown option 'thread'; did you mean 'threads'?"),
    ],
)
def test_options_are_checked_by_name_value_and_range(
    checkpoint: Checkpoint, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(checkpoint, **options)


@pytest.mark.parametrize(("options", "checked"), [(EngineOptions, EngineConfig), (SamplingOptions, SamplingParams)])
def test_typed_options_are_the_fields(options: Any, checked: Any) -> None:
    names = vars(rules)  # which the module imports for type checkers alone: a start need not pay for it
    hints = get_type_hints(checked, localns=names)
    assert list(options.__annotations__) == [field.name for field in fields(checked)]
    assert get_type_hints(options, localns=names) == hints


# Drafters -----------------------------------------------------------------------------------------------------------
class Own:
    """Three methods, as the documents say."""

    def __init__(self, answer: Sequence[int]) -> None:
        self.answer, self.asked, self.forgotten = list(answer), 0, 0

    def propose(self, contexts: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        self.asked += 1
        return [
            Draft(self.answer[len(context.tokens) - context.num_prompt :][:count], [8] * count)
            for context, count in zip(contexts, counts, strict=True)
        ]

    def seconds(self, count: int) -> float:
        return 0.0

    def forget(self, number: int) -> None:
        self.forgotten += 1


def test_a_drafter_of_ones_own(checkpoint: Checkpoint, llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=0)
    plain = llm.generate(PROMPT, params)
    own = Own(plain.token_ids)
    with LLM(checkpoint, device="cpu", threads=1, kv_tokens=512, speculate=own) as fast:
        fix_length(fast.engine, 3)  # also where no draft pays
        result = fast.generate(PROMPT, params)
    assert bits(result) == bits(plain)
    assert result.choices[0].speculation.accepted > 0
    assert own.forgotten == 1


def fail(*arguments: object) -> Any:
    raise ZeroDivisionError("a defect")


@pytest.mark.parametrize(
    "wrong",
    [
        {"propose": fail},
        {"propose": lambda contexts, counts: []},
        {"propose": lambda contexts, counts: [None] * len(contexts)},
        {"propose": lambda contexts, counts: [[0.5]] * len(contexts)},
        {"seconds": fail},
        {"seconds": lambda count: "soon"},
        {"forget": fail},
    ],
)
def test_a_drafter_that_fails_costs_no_answer(
    checkpoint: Checkpoint, llm: LLM, caplog: pytest.LogCaptureFixture, wrong: dict[str, Any]
) -> None:
    failing = Own([])
    vars(failing).update(wrong)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(checkpoint, device="cpu", threads=1, kv_tokens=512, speculate=failing) as fast:
        fix_length(fast.engine, 3)
        assert fast.generate(PROMPT, params).token_ids == llm.generate(PROMPT, params).token_ids
        assert fast.generate(PROMPT, params).token_ids == llm.generate(PROMPT, params).token_ids
    assert caplog.text.count("the drafter failed") == 1


def test_seeds_survive_json(llm: LLM) -> None:
    """Derived and drawn ones too: replaying one gives its answer again."""
    params = SamplingParams(max_tokens=6, temperature=1.2, n=4, ignore_eos=True)
    result = llm.generate(PROMPT, params, seed=2**53 - 1)
    seeds = [choice.seed for choice in result.choices]
    assert seeds[0] == 2**53 - 1
    assert len(set(seeds)) == 4
    for choice in [*result.choices, *llm.generate(PROMPT, params).choices]:
        assert choice.seed is not None
        assert int(float(choice.seed)) == choice.seed < 2**53
        assert llm.generate(PROMPT, params, n=1, seed=choice.seed).token_ids == choice.token_ids
    with pytest.raises(
        RequestError, match="seed is 9007199254740992; allowed: an integer from 0 to 9,007,199,254,740,991"
    ):
        llm.generate(PROMPT, seed=2**53)


def test_a_length_that_the_context_cannot_hold_is_refused(llm: LLM) -> None:
    room = llm.engine.context_length - len(PROMPT)
    longest = llm.generate(PROMPT, max_tokens=room, ignore_eos=True)
    assert (longest.params.max_tokens, len(longest.token_ids)) == (room, room)
    whole = llm.generate(PROMPT, ignore_eos=True)
    assert (whole.params.max_tokens, len(whole.token_ids)) == (None, room)
    with pytest.raises(
        ContextLengthError, match=f"The prompt has 5 and max_tokens is {room + 1}: {room + 6} together"
    ) as reported:
        llm.generate(PROMPT, max_tokens=room + 1)
    assert reported.value.param == "max_tokens"


def test_tokens_tell_their_rank(llm: LLM) -> None:
    result = llm.generate(PROMPT, max_tokens=12, temperature=1.5, seed=3, logprobs=4, ignore_eos=True)
    ranks = [token.rank for token in result.tokens]
    assert max(rank or 0 for rank in ranks) > 4
    for token in result.tokens:
        assert token.rank is not None
        place = [other for other, _ in token.top].index(token.id) + 1 if token.rank <= 4 else None
        assert place is None or place == token.rank
    scored = [token for token in llm.score([*PROMPT, *result.token_ids], top=4)[len(PROMPT) :] if token is not None]
    assert [token.rank for token in scored] == ranks
    assert all(token.rank is None for token in llm.generate(PROMPT, max_tokens=3).tokens)

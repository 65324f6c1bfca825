"""Answers with a given beginning: /v1/fork continues one, /v1/whatif explains a step, /v1/replay answers again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from unspool.chat.tools import Toolbox
from unspool.errors import RequestError
from unspool.events import Token
from unspool.params import MAX_SEED, SamplingParams
from unspool.results import Choice, Delta
from unspool.server.chat_completions import conversation
from unspool.server.dialect import Body, WholeWriter, Writer, logprob, sampling_params, usage
from unspool.server.job import Job, Run
from unspool.server.service import Service
from unspool.server.sse import DONE, frame
from unspool.text.detokenizer import Detokenizer

TRACE_TOP = 64  # tokens that /v1/whatif follows by default
CROWD = 16  # random requests in the batch of a replayed one
CROWD_PROMPT, CROWD_ANSWER = 64, 48  # tokens of each, at most


# From a body to a job -----------------------------------------------------------------------------------------------
def prepare_fork(service: Service, body: Body) -> Job:
    prompt, is_chat, warnings = _prompt(service, body)
    output = _output(service, body)
    params = _params(body)
    return Job(
        [(prompt, params)],
        outputs=[output],
        stream=bool(body.get("stream")),
        is_chat=is_chat,
        warnings=warnings,
        prompt_field="messages" if "messages" in body else "prompt",
    )


def prepare_whatif(service: Service, body: Body) -> Job:
    if body.get("beam") is not None:
        raise RequestError("a beam search makes no draw that could be explained", "beam")
    job = prepare_fork(service, {"trace_top": TRACE_TOP, **body})
    [(prompt, params)], [output] = job.prompts, job.outputs
    # One more token, with a full report. A token that would end an answer can be explained too.
    params = replace(
        params, max_tokens=len(output) + 1, n=1, best_of=None, trace=True, logprobs=0, stop=(), bad_words=()
    )
    return replace(job, prompts=[(prompt, params)])


def prepare_replay(service: Service, body: Body) -> Job:
    """The request, together with random ones that share only its batch."""
    job = prepare_fork(service, body)
    if job.prompts[0][1].seed is None and job.prompts[0][1].temperature != 0:
        raise RequestError("without its seed an answer cannot be given again", "seed")
    rng = random.Random()
    vocab_size, context = service.llm.checkpoint.config.vocab_size, service.llm.engine.context_length
    length = max(1, min(CROWD_PROMPT, context - CROWD_ANSWER - 1))
    crowd: list[tuple[list[int], SamplingParams]] = []
    for _ in range(body.get("crowd", CROWD)):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, length))]
        params = SamplingParams(
            max_tokens=rng.randint(1, min(CROWD_ANSWER, context - len(prompt))),
            temperature=rng.uniform(0.5, 1.5),
            top_p=rng.uniform(0.5, 1.0),
            seed=rng.randint(0, MAX_SEED),
            ignore_eos=True,
        )
        crowd.append((prompt, params))
    before = rng.randint(0, len(crowd))  # so that it is not always the first of its batch
    prompts = [*crowd[:before], job.prompts[0], *crowd[before:]]
    outputs = [*([[]] * before), job.outputs[0], *([[]] * (len(crowd) - before))]
    return replace(job, prompts=prompts, outputs=outputs, asked=before, stream=False)


def _prompt(service: Service, body: Body) -> tuple[list[int], bool, list[str]]:
    if ("prompt" in body) == ("messages" in body):
        raise RequestError("give either prompt or messages", "prompt")
    options = body.get("chat_template_kwargs", {})
    if "messages" in body:
        if "is_chat" in body:
            raise RequestError("is_chat says something about a prompt; messages are a chat", "is_chat")
        rendered = service.render(conversation(body["messages"]), Toolbox(), options)
        return rendered.ids, True, list(rendered.warnings)
    if options:
        raise RequestError("chat_template_kwargs does nothing with a prompt", "chat_template_kwargs")
    prompt = body["prompt"]
    ids = service.encode(prompt, "prompt") if isinstance(prompt, str) else prompt
    return ids, bool(body.get("is_chat", False)), []


def _output(service: Service, body: Body) -> list[int]:
    text = body.get("output_text", "")
    service.check_length([text], "output_text")
    more = service.llm.tokenizer.encode(text, add_special=False) if text else []
    return [*body.get("output", ()), *more]


def _params(body: Body) -> SamplingParams:
    return sampling_params(body, max_tokens=body.get("max_tokens"), logprobs=body.get("logprobs"))


# What comes back ----------------------------------------------------------------------------------------------------
class TokenTexts:
    """Entries of one choice's tokens, each with the characters that it completes."""

    def __init__(self, writer: WholeWriter, choice: Choice) -> None:
        run, tokenizer = writer.run, writer.tokenizer
        prompt, params = run.job.prompts[_prompt_number(run, choice)]
        is_apart = run.job.is_chat and params.constraint is None  # a text of its own: see Engine.add
        self._detokenizer = Detokenizer(tokenizer, prompt_ids=() if is_apart else prompt)
        self._tokenizer = tokenizer

    def entries(self, tokens: Sequence[Token]) -> list[Body]:
        return [self._entry(token) for token in tokens]

    def _entry(self, token: Token) -> Body:
        entry: Body = {"id": token.id, "text": self._detokenizer.push(token.id)}
        entry |= token_marks(token.id, self._tokenizer)
        if token.logprob is not None:
            entry |= {"logprob": logprob(token.logprob), "rank": token.rank}
        if token.top:
            entry["top"] = [
                {"id": id, "text": self._tokenizer.token_text(id), "logprob": logprob(value)} for id, value in token.top
            ]
        if token.trace is not None:
            entry["trace"] = trace_entry(token.trace.as_dict(), self._tokenizer)
        return entry


def token_marks(id: int, tokenizer: Any) -> Body:
    """Facts that a token's text does not show: it is a control token, or only part of a character."""
    if id in tokenizer.special_ids:
        return {"special": tokenizer.token_text(id)}
    data = tokenizer.token_bytes(id)
    try:
        data.decode()
    except UnicodeDecodeError:
        return {"bytes": list(data)}
    return {}


def trace_entry(trace: Body, tokenizer: Any) -> Body:
    """A trace, and the text of each token that it names."""
    ids = {trace["token"], *(id for id, _ in trace["alternatives"]), *(one["token"] for one in trace["candidates"])}
    return {**trace, "texts": {str(id): tokenizer.token_text(id) for id in sorted(ids)}}


def _prompt_number(run: Run, choice: Choice) -> int:
    first = 0
    for number, (_, params) in enumerate(run.job.prompts):
        first += params.n
        if choice.index < first:
            return number
    raise IndexError(choice.index)


def _numbers(run: Run) -> list[int | None]:
    """The numbers that /v1/engine/steps and /v1/engine/cache use for the first answer to each prompt; None if the
    engine is in another process, which numbers its own requests."""
    ids = [one.id for one in run.submissions if one.id is not None]
    return [int(id[1:]) if id.startswith("r") else None for id in ids]


class ForkWriter(Writer):
    prefix = "fork-"

    def begin(self) -> Iterable[bytes]:
        self._texts = [TokenTexts(self, choice) for choice in self.run.choices]
        yield frame(self._head("fork.begin") | self._begin())

    def write(self, delta: Delta) -> Iterable[bytes]:
        choice = delta.choice
        text = "".join(getattr(part, "text", "") for part in delta.parts)
        if text or delta.tokens or delta.held:
            tokens = self._texts[choice.index].entries(delta.tokens)
            held = {"held": delta.held} if delta.held else {}
            yield frame({"object": "fork.tokens", "index": choice.index, "text": text, "tokens": tokens, **held})
        if delta.end is not None:
            yield frame({"object": "fork.end", **self._end(choice)})

    def end(self) -> Iterable[bytes]:
        yield frame({"object": "fork.done", "usage": usage(self.run), "unspool": self.service.report(self.run)})
        yield DONE

    def body(self) -> Body:
        choices = [
            {
                **self._end(choice),
                "text": choice.message.content,
                "tokens": TokenTexts(self, choice).entries(choice.tokens),
            }
            for choice in self.run.choices
        ]
        more = {"choices": choices, "usage": usage(self.run), "unspool": self.service.report(self.run)}
        return self._head("fork") | self._begin() | more

    def _head(self, object: str) -> Body:
        return {"id": self.id, "object": object, "created": self.run.created, "model": self.service.name}

    def _begin(self) -> Body:
        run = self.run
        [(prompt, _)] = run.job.prompts
        return {
            "prompt": prompt,
            "output": run.job.outputs[0],
            "number": _numbers(run)[0],
            "params": run.params[0].as_dict(),
            "receipt": run.receipt.as_dict(),
            "warnings": list(dict.fromkeys([*run.job.warnings, *run.params[0].warnings])),
        }

    def _end(self, choice: Choice) -> Body:
        assert choice.end is not None
        end = choice.end
        return {"index": choice.index, "finish_reason": end.reason, "stop": end.stop, "seed": end.seed}


class WhatIfWriter(WholeWriter):
    prefix = "whatif-"

    def body(self) -> Body:
        [choice] = self.run.choices
        step = choice.tokens[-1] if choice.tokens else None
        if step is None or step.trace is None:
            raise RequestError("the given output ends the answer: there is no next step", "output")
        assert choice.end is not None
        usage = choice.end.usage
        return {
            "id": self.id,
            "object": "whatif",
            "created": self.run.created,
            "model": self.service.name,
            "index": len(self.run.job.outputs[0]),
            "token": {
                "id": step.id,
                "text": self.tokenizer.token_text(step.id),
                **token_marks(step.id, self.tokenizer),
            },
            "trace": trace_entry(step.trace.as_dict(), self.tokenizer),
            "cached_tokens": usage.cached_tokens,
            "unspool": self.service.report(self.run),
        }


class ReplayWriter(WholeWriter):
    prefix = "replay-"

    def body(self) -> Body:
        run = self.run
        number = run.job.asked
        first = sum(params.n for _, params in run.job.prompts[:number])
        ours = run.choices[first : first + run.job.prompts[number][1].n]
        return {
            "id": self.id,
            "object": "replay",
            "created": run.created,
            "model": self.service.name,
            "choices": [
                {
                    "index": index,
                    "text": choice.message.content,
                    "finish_reason": choice.end.reason if choice.end is not None else None,
                    "tokens": TokenTexts(self, choice).entries(choice.tokens),
                }
                for index, choice in enumerate(ours)
            ],
            "crowd": len(run.job.prompts) - 1,
            "place": number,
            "params": run.params[number].as_dict(),
            "receipt": self.service.llm.receipt(run.params[number].seed).as_dict(),
        }

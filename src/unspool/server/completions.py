"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from unspool.chat.parts import Content
from unspool.errors import RequestError
from unspool.events import Token
from unspool.results import Choice, Delta
from unspool.server.dialect import (
    Body,
    Writer,
    ending,
    logprob,
    prompt_ids,
    prompt_logprobs,
    response_format,
    sampling_params,
    timings,
    traces,
    usage,
)  # fmt: skip
from unspool.server.job import Job
from unspool.server.service import Service
from unspool.server.sse import DONE, ChunkTemplate, frame
from unspool.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from unspool.text.tokenizer import Tokenizer

DEFAULT_LENGTH = 16  # OpenAI's


class Offsets:
    """Offsets of tokens in a text: a token starts after the characters that the tokens before it complete, so all
    tokens of one character start at that character."""

    def __init__(self, tokenizer: Tokenizer, start: int = 0) -> None:
        self._detokenizer, self._offset = Detokenizer(tokenizer), start

    def of(self, tokens: Sequence[Token]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token.id))
        return offsets


class CompletionWriter(Writer):
    prefix = "cmpl-"

    def begin(self) -> Iterable[bytes]:
        self._places: dict[int, Offsets] = {}
        self._templates: dict[int, ChunkTemplate] = {}  # by choice: chunks with text and nothing else
        wants = ("trace", "return_token_ids", "timings_per_token")
        self._text_only = self.asked.get("logprobs") is None and not any(self.asked.get(name) for name in wants)
        self._text_only = self._text_only and not self._wants_usage_so_far
        if self.asked.get("echo"):
            for choice in self.run.choices:
                text = self._prompt_text(choice)
                self._places[choice.index] = Offsets(self.tokenizer, len(text))
                yield self._chunk(choice, text)

    def write(self, delta: Delta) -> Iterable[bytes]:
        choice, parts = delta.choice, delta.parts
        if self._text_only and delta.end is None and len(parts) == 1 and isinstance(parts[0], Content):
            return (self._content_chunk(choice, parts[0].text),)
        return self._write(delta)

    def _write(self, delta: Delta) -> Iterable[bytes]:
        text = "".join(part.text for part in delta.parts if isinstance(part, Content))
        if text or delta.tokens:
            yield self._chunk(delta.choice, text, delta.tokens)
        if delta.end is not None:
            yield self._chunk(delta.choice, "", is_last=True)

    def end(self) -> Iterable[bytes]:
        if self._wants_usage:
            yield frame(self._head() | {"choices": [], "usage": usage(self.run), "timings": timings(self.run)})
        yield DONE

    def body(self) -> Body:
        choices = []
        for choice in self.run.choices:
            before = self._prompt_text(choice) if self.asked.get("echo") else ""
            entry: Body = {
                "index": choice.index,
                "text": before + choice.message.content,
                "logprobs": self._whole_logprobs(choice),
                "prompt_logprobs": None,  # these three as in vLLM: null unless requested
                "prompt_token_ids": None,
                "token_ids": None,
                **ending(choice),
            }
            choices.append(entry | self._more(choice) | self._ids(choice.tokens) | self._trace(choice.tokens))
        more: Body = {"choices": choices, "usage": usage(self.run), "timings": timings(self.run)}
        more["unspool"] = self.service.report(self.run)
        return self._head() | more

    @property
    def _wants_usage(self) -> bool:
        return bool(self.asked.get("stream_options", {}).get("include_usage"))

    @property
    def _wants_usage_so_far(self) -> bool:
        return self._wants_usage and bool(self.asked["stream_options"].get("continuous_usage_stats"))

    def _head(self) -> Body:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.run.created,
            "model": self.service.name,
            "system_fingerprint": self.service.fingerprint,
        }

    def _content_chunk(self, choice: Choice, text: str) -> bytes:
        template = self._templates.get(choice.index)
        if template is None:
            template = self._templates[choice.index] = ChunkTemplate(self._chunk(choice, ChunkTemplate.TEXT))
        return template.render(text)

    def _chunk(self, choice: Choice, text: str, tokens: Sequence[Token] = (), *, is_last: bool = False) -> bytes:
        logprobs = None
        if tokens and self.asked.get("logprobs") is not None:
            place = self._places.setdefault(choice.index, Offsets(self.tokenizer))
            logprobs = self._logprobs(tokens, place.of(tokens))
        entry: Body = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}
        entry |= self._trace(tokens) | self._ids(tokens) if tokens else {}
        chunk = self._head()
        if is_last:
            entry |= ending(choice) | self._more(choice)
            if self.run.is_whole:
                chunk["unspool"] = self.service.report(self.run)
        if self._wants_usage:
            chunk["usage"] = None
        if self._wants_usage_so_far:
            chunk["usage"] = usage(self.run)
        if self.asked.get("timings_per_token") or (is_last and self.run.is_whole):
            chunk["timings"] = timings(self.run)
        return frame(chunk | {"choices": [entry]})

    def _prompt_text(self, choice: Choice) -> str:
        return self.tokenizer.decode(self.run.job.prompts[self.prompt_of(choice)][0])

    def _prompt_tokens(self, choice: Choice) -> list[Token]:
        """The prompt's tokens with their logprobs; the first has none."""
        number = self.prompt_of(choice)
        ids = self.run.job.prompts[number][0]
        scored = self.scored(number)
        return [token or Token(id) for id, token in zip(ids, scored or [None] * len(ids), strict=True)]

    def _more(self, choice: Choice) -> Body:
        number = self.prompt_of(choice)
        ids, more = self.run.job.prompts[number][0], {}
        if self.asked.get("prompt_logprobs") is not None:
            more["prompt_logprobs"] = prompt_logprobs(ids, self.scored(number), self.tokenizer)
        if self.asked.get("return_token_ids"):
            more["prompt_token_ids"] = ids
        return more

    def _ids(self, tokens: Sequence[Token]) -> Body:
        return {"token_ids": [token.id for token in tokens]} if self.asked.get("return_token_ids") else {}

    def _trace(self, tokens: Sequence[Token]) -> Body:
        return {"trace": traces(tokens)} if self.asked.get("trace") else {}

    def _whole_logprobs(self, choice: Choice) -> Body | None:
        if self.asked.get("logprobs") is None:
            return None
        if not self.asked.get("echo"):
            return self._logprobs(choice.tokens, Offsets(self.tokenizer).of(choice.tokens))
        before = self._prompt_tokens(choice)
        offsets = Offsets(self.tokenizer).of(before)
        offsets += Offsets(self.tokenizer, len(self._prompt_text(choice))).of(choice.tokens)
        return self._logprobs([*before, *choice.tokens], offsets)

    def _logprobs(self, tokens: Sequence[Token], offsets: Sequence[int]) -> Body:
        return {
            "tokens": [self._key(token.id) for token in tokens],
            "token_logprobs": [logprob(token.logprob) for token in tokens],
            "top_logprobs": [self._top_logprobs(token) for token in tokens],
            "text_offset": list(offsets),
        }

    def _top_logprobs(self, token: Token) -> Body | None:
        """The likeliest tokens and the chosen one, which may not be among them."""
        if token.logprob is None:
            return None
        named: Body = {}
        for id, value in token.top:
            named.setdefault(self._key(id), logprob(value))
        return named | {self._key(token.id): logprob(token.logprob)}

    def _key(self, id: int) -> str:
        return f"token_id:{id}" if self.asked.get("return_tokens_as_token_ids") else token_key(id, self.tokenizer)


def token_key(id: int, tokenizer: Tokenizer) -> str:
    """A token's text, or its bytes if it is part of a character, as OpenAI writes them: `bytes:\\xf0\\x9f`."""
    data = tokenizer.token_bytes(id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prepare(service: Service, body: Body) -> Job:
    stream, echo, top = bool(body.get("stream")), body.get("echo"), body.get("logprobs")
    if stream and echo and top is not None:
        raise RequestError("echo with logprobs cannot be streamed: the prompt's logprobs come last", "echo")
    scored = body.get("prompt_logprobs", top if echo else None)
    defaults: dict[str, Any] = {} if "max_tokens" in body else {"max_tokens": DEFAULT_LENGTH}
    length = body.get("max_tokens", DEFAULT_LENGTH)
    if scored is not None and top is not None:
        scored = max(scored, top)
    bound = response_format(body.get("response_format"))
    if bound is not None and "constraint" in body:
        raise RequestError("constraint and response_format bind the answer twice", "constraint")
    params = sampling_params(body, max_tokens=length, logprobs=top, prompt_logprobs=scored, constraint=bound)
    return Job([(ids, params) for ids in prompt_ids(service, body, "prompt")], stream, defaults=defaults)

"""What `generate` returns: the fold of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, field, replace
from typing import Any, Generic, TypeVar, cast

from unspool.chat.answers import Message, ToolCall
from unspool.chat.parts import Part
from unspool.errors import RequestError
from unspool.events import DraftStats, Event, Finished, FinishReason, StepWork, Text, Timings, Token, Usage
from unspool.params import ResolvedParams
from unspool.records import record

T = TypeVar("T")
SHOWN_CHARS = 120  # of an answer, where a result is printed


@record(frozen=True, repr=False)
class Completion:
    """One answer. `tokens` carry what was asked for of each: logprob, alternatives, trace.

    `text` is what the model wrote. In a chat, `reasoning` is what it thought first, `tool_calls` are the calls in its
    text, if it was given tools, and `content` is the rest.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str | int | None = None  # the stop string or end token that ended it
    seed: int | None = None
    prompt_logprobs: tuple[Token | None, ...] = ()  # the first answer has them, if they were asked for
    mean_logprob: float | None = None  # of its tokens, where the best of several answers were asked for
    beam_score: float | None = None  # where it was searched for
    speculation: DraftStats | None = None  # None: no draft was made for it
    work: StepWork | None = None  # of the steps that made it; None: no token came
    message: Message | None = None  # the text as content and calls

    def __repr__(self) -> str:
        """The answer and how it ended; the tokens are counted, not shown."""
        calls = f", {len(self.tool_calls)} tool calls" if self.tool_calls else ""
        ending = f"finish_reason={self.finish_reason!r}, seed={self.seed}"
        text = self.text if len(self.text) <= SHOWN_CHARS else f"{self.text[:SHOWN_CHARS]}…"
        return f"Completion({text!r}, {len(self.tokens)} tokens{calls}, {ending})"

    @property
    def content(self) -> str:
        return self.text if self.message is None else self.message.content

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered; "" if it did not."""
        return "" if self.message is None else self.message.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return () if self.message is None else tuple(self.message.calls)

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: text, ids, logprobs where they were asked for, the ending, and the calls of tools."""
        calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in self.tool_calls]
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop": self.stop,
            "seed": self.seed,
            **({} if self.logprobs is None else {"logprobs": self.logprobs}),
            **({"content": self.content, "tool_calls": calls} if calls else {}),
            **({"reasoning": self.reasoning} if self.reasoning else {}),
        }

    @property
    def logprobs(self) -> list[float] | None:
        """Of the chosen tokens; None unless the request asked for logprobs."""
        if any(token.logprob is None for token in self.tokens):
            return None
        return [token.logprob for token in self.tokens if token.logprob is not None]


def figures(answer: Finished | Completion) -> dict[str, Any]:
    """Optional figures of an answer by name: only those that apply."""
    found: dict[str, Any] = {}
    if answer.mean_logprob is not None:
        found["mean_logprob"] = answer.mean_logprob
    if answer.beam_score is not None:
        found["beam_score"] = answer.beam_score
    if answer.speculation is not None:
        found["speculation"] = answer.speculation.as_dict()
    return found


@record(frozen=True)
class Receipt:
    """What the answer is a function of, besides the prompt and the parameters."""

    model: str  # fingerprint of the weights
    version: str
    kernels: str
    seed: int
    overrides: tuple[str, ...] = ()  # what was set instead of the model's own files, as option=value

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; `overrides` only where there are any."""
        entries = {"model": self.model, "version": self.version, "kernels": self.kernels, "seed": self.seed}
        return entries | ({"overrides": list(self.overrides)} if self.overrides else {})


@record(frozen=True, repr=False)
class Result(Generic[T]):
    """All answers to one prompt; the first one's fields are the result's own. T is the type of `parsed`."""

    prompt_ids: tuple[int, ...]
    params: ResolvedParams
    choices: tuple[Completion, ...]
    receipt: Receipt
    prompt_warnings: tuple[str, ...] = ()  # about how a conversation became the prompt
    is_chat: bool = False  # the answer is a text of its own and does not continue the prompt's
    # Not kept by pickle: how tokens are spelled, and what a text becomes where a schema was given.
    token_text: Callable[[int], str] | None = field(default=None, compare=False)
    parse: Callable[[str], Any] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"Result({', '.join(map(repr, self.choices))})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "token_text": None, "parse": None}

    def _repr_html_(self) -> str:
        from unspool.notebook import as_html

        usage, kernels = self.usage, self.receipt.kernels
        about = f"{usage.prompt_tokens:,} prompt tokens · {usage.completion_tokens:,} tokens · {kernels}"
        return as_html(self.choices, self.token_text, about)

    @property
    def parsed(self) -> T:
        """The answer as a value of the `schema` that was asked for; a ParseError if it was cut short.

        >>> llm.generate("A prime number:", schema={"type": "integer", "maximum": 9}, temperature=0).parsed < 10
        True
        """
        if self.parse is None:
            raise RequestError("there is no schema: give one, as in llm.chat(messages, schema=Person)", "schema")
        return cast("T", self.parse(self.content))

    @property
    def token_texts(self) -> list[str]:
        """What each token spells; half a character shows as U+FFFD.

        >>> llm.generate("The capital of France is", max_tokens=2, temperature=0).token_texts
        [' Paris', '.']
        """
        if self.token_text is None:
            raise RequestError("this result has left its model: llm.decode([id]) spells a token")
        return [self.token_text(id) for id in self.token_ids]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: the answers, with the parameters in force, the usage, the timings and the receipt.

        >>> sorted(llm.generate("The sky", max_tokens=2).as_dict())[:4]
        ['finish_reason', 'params', 'receipt', 'seed']
        """
        return {
            **self.choices[0].as_dict(),
            **({"choices": [choice.as_dict() for choice in self.choices]} if len(self.choices) > 1 else {}),
            "params": self.params.as_dict(),
            "warnings": list(self.warnings),
            "usage": asdict(self.usage) | {"total_tokens": self.usage.total_tokens},
            "timings": asdict(self.timings),
            "receipt": self.receipt.as_dict(),
        }

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def content(self) -> str:
        return self.choices[0].content

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self.choices[0].tokens

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[float] | None:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def timings(self) -> Timings:
        return self.choices[0].timings

    @property
    def usage(self) -> Usage:
        """Of all answers together: the prompt counts once."""
        first = self.choices[0].usage
        return Usage(first.prompt_tokens, sum(c.usage.completion_tokens for c in self.choices), first.cached_tokens)

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self.prompt_warnings, *self.params.warnings)

    @property
    def prompt_logprobs(self) -> list[Token | None] | None:
        """For each prompt token its logprob given those before it; None for the first, which nothing predicts."""
        return list(self.choices[0].prompt_logprobs) or None


@record(slots=True)
class Delta:
    """The part of a choice that one event adds."""

    choice: Choice
    parts: Sequence[Part] = ()
    tokens: Sequence[Token] = ()
    end: Finished | None = None
    held: str = ""  # text that waits: see Text


@record(slots=True)
class Choice:
    """One answer while it is generated. Text after the end of its message is dropped."""

    index: int
    message: Message = field(default_factory=Message)
    tokens: list[Token] = field(default_factory=list)
    end: Finished | None = None

    def push(self, event: Event) -> Delta:
        """Take in an event; a failure is raised."""
        if isinstance(event, Text):
            if self.message.is_full:
                return Delta(self)
            parts, tokens = self.message.take(event.text, event.tokens)
            self.tokens += tokens
            return Delta(self, parts, tokens, held=event.held)
        if isinstance(event, Finished):
            self.end = event
            return Delta(self, self.message.flush(), end=event)
        raise event.error

    @property
    def wants_no_more(self) -> bool:
        return self.end is not None or self.message.is_full

    @property
    def num_tokens(self) -> int:
        """Tokens that count as generated. The engine may compute a few more after a message has ended."""
        if self.end is None or self.message.is_full:
            return len(self.tokens)
        return self.end.usage.completion_tokens

    def completion(self) -> Completion:
        end = self.end
        assert end is not None, "the answer is not whole"
        return Completion(
            text=self.message.text,
            tokens=tuple(self.tokens),
            finish_reason=end.reason,
            usage=replace(end.usage, completion_tokens=self.num_tokens),
            timings=end.timings,
            stop=end.stop,
            seed=end.seed,
            prompt_logprobs=end.prompt_logprobs,
            mean_logprob=end.mean_logprob,
            beam_score=end.beam_score,
            speculation=end.speculation,
            work=end.work,
            message=self.message,
        )


class Fold:
    """Collects the events of a request; `result` once every choice has ended. There is no other way from events to a
    result. `messages` find the tool calls in the choices, one for each; none where there are no tools.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: ResolvedParams,
        receipt: Receipt,
        prompt_warnings: tuple[str, ...] = (),
        messages: Sequence[Message] = (),
        *,
        is_chat: bool = False,
    ) -> None:
        self._prompt_ids, self._params, self._receipt, self._is_chat = tuple(prompt_ids), params, receipt, is_chat
        self._prompt_warnings = prompt_warnings
        messages = messages or [Message() for _ in range(params.n)]
        self._choices = [Choice(index, message) for index, message in enumerate(messages)]

    def push(self, event: Event) -> None:
        """Take in an event; a failure is raised."""
        self._choices[event.choice].push(event)

    @property
    def is_done(self) -> bool:
        return all(choice.end is not None for choice in self._choices)

    @property
    def wants_no_more(self) -> bool:
        """Whether choices still run although each of them already has all that the request needs."""
        return not self.is_done and all(choice.wants_no_more for choice in self._choices)

    def result(self) -> Result:
        choices = tuple(choice.completion() for choice in self._choices)
        return Result(
            self._prompt_ids, self._params, choices, self._receipt, self._prompt_warnings, is_chat=self._is_chat
        )

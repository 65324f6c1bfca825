"""LLM: a model in this process, for any number of threads. `generate` is the fold of `stream`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeGuard, cast, overload

from unspool.config import EngineConfig
from unspool.engine.driver import Driver
from unspool.engine.engine import Engine
from unspool.engine.streams import Stream
from unspool.errors import RequestError
from unspool.events import Token
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.params import SamplingParams
from unspool.results import Receipt, Result
from unspool.weights.store import resolve

if TYPE_CHECKING:
    from unspool.chat.model_chat import ModelChat, RenderedPrompt
    from unspool.chat.template import ChatTemplate
    from unspool.chat.tools import Toolbox

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
ToolChoice = str | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
Job = tuple[Sequence[int], SamplingParams | None]  # token ids and how they are to be continued


class LLM:
    """A model, ready to answer.

    >>> llm = LLM()                                             # the default model, fetched once
    >>> llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0)).text

    `model` is a name ("smollm2"), a GGUF file, a Hugging Face directory or a hub id; options are EngineConfig's.
    """

    def __init__(self, model: str | Path | Checkpoint = "smollm2", **options: Any) -> None:
        config = make_config(options)
        self.checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(resolve(model))
        self.engine = Engine(self.checkpoint, config, tokenizer=self.checkpoint.tokenizer)
        self.checkpoint = self.engine.checkpoint  # quantized, if that was asked for
        assert self.engine.tokenizer is not None  # it was just made
        self.tokenizer = self.engine.tokenizer
        self.driver = Driver(self.engine)

    # Generating -----------------------------------------------------------------------------------------------------
    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None) -> Result: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompts: Sequence[int], params: SamplingParams | None = None) -> Result: ...
    @overload
    def generate(self, prompts: Sequence[Prompt], params: Params = None) -> list[Result]: ...
    def generate(self, prompts: Any, params: Any = None) -> Any:
        """Answer one prompt (text or token ids), or many as one continuous batch, each with its own parameters."""
        many = not isinstance(prompts, str) and not (prompts and isinstance(prompts[0], int))
        each = list(prompts) if many else [prompts]
        per_prompt = _spread(params, len(each))
        results = self._answer([(self.encode(p), one) for p, one in zip(each, per_prompt, strict=True)])
        return results if many else results[0]

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Tools = (),
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        **template_options: Any,
    ) -> Result:
        """Answer a conversation: a list of {"role": …, "content": …}.

        `tools` and `tool_choice` are in OpenAI's form; the calls that the model makes are `result.tool_calls`.
        """
        toolbox = make_toolbox(tools, tool_choice, parallel_tool_calls)
        with self._chat_stream(messages, params, toolbox, template_options, whole=parallel_tool_calls) as stream:
            return stream.result()

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        tools: Tools = (),
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
    ) -> Stream:
        """The events of an answer as they come: Text, then Finished for each choice. Closing the stream aborts it.

        A list of messages is a chat; with tools, `stream.messages` has the content and the calls of each choice so far.
        Failures are raised.
        """
        if is_chat(prompt):
            toolbox = make_toolbox(tools, tool_choice, parallel_tool_calls)
            return self._chat_stream(prompt, params, toolbox, {})
        if tools:
            raise RequestError("tools need a conversation, a list of messages", "tools")
        return self._start(Stream(self.driver, self.encode(cast("Prompt", prompt)), params or SamplingParams()))

    def _chat_stream(
        self,
        messages: Messages,
        params: SamplingParams | None,
        toolbox: Toolbox,
        options: Mapping[str, Any],
        *,
        whole: bool = False,
    ) -> Stream:
        params, chat = params or SamplingParams(), self.model_chat
        if toolbox.binds:
            if params.constraint is not None:
                raise RequestError("constraint and tools bind the answer twice", "constraint")
            params = replace(params, constraint=chat.constraint(toolbox))
        prompt, syntax = self._render(messages, toolbox, options), chat.syntax(toolbox)
        stream = Stream(
            self.driver, prompt.ids, params, prompt_warnings=prompt.warnings, syntax=syntax, whole=whole
        )
        return self._start(stream)

    def _start(self, stream: Stream) -> Stream:
        Stream.start(self.driver, [stream])
        return stream

    def score(self, text: Prompt, top: int = 0) -> list[Token | None]:
        """The logprob of each token of a text given those before it, in one pass; None for the first."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=top)
        scored = self._answer([(self.encode(text), params)])[0].prompt_logprobs
        assert scored is not None
        return scored

    def fork(
        self,
        result: Result,
        index: int,
        token: int | None = None,
        params: SamplingParams | None = None,
        choice: int = 0,
    ) -> Result:
        """What if the answer had gone on otherwise from its token `index`: with `token` there, or with `params`.

        Without `params` the parameters and the seed stay, so what follows is what would have followed. The computed
        prefix is shared, not computed again.
        """
        kept = result.choices[choice].token_ids
        if not 0 <= index <= len(kept):
            raise RequestError(f"index is {index}; the answer has {len(kept)} tokens", "index")
        output = kept[:index] + ([] if token is None else [token])
        if params is None:
            params = result.params.request(seed=result.choices[choice].seed, n=1, best_of=1)
        return self._answer([(result.prompt_ids, params)], output=output)[0]

    # Keeping --------------------------------------------------------------------------------------------------------
    def save_state(self, path: str | Path, prompt: Prompt | Messages) -> int:
        """Compute a prompt and write its keys and values to a file; how many tokens that are."""
        from unspool.engine import state

        ids = self._ids(prompt)
        self._answer([(ids, SamplingParams(max_tokens=0))])
        return self.driver.call(lambda engine: state.save(engine, ids, Path(path)))

    def load_state(self, path: str | Path) -> int:
        """Take a saved prompt into the prefix cache; how many tokens are thereby computed already."""
        from unspool.engine import state

        return len(self.driver.call(lambda engine: state.load(engine, Path(path))))

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, made when first asked for: plain completion need not pay for it."""
        from unspool.chat.template import template_of

        return template_of(self.checkpoint, self.tokenizer)

    @cached_property
    def model_chat(self) -> ModelChat:
        """How this model holds a conversation."""
        from unspool.chat.model_chat import ModelChat

        return ModelChat(self.checkpoint.name, self.tokenizer, self.template)

    # Text to tokens -------------------------------------------------------------------------------------------------
    def _ids(self, prompt: Prompt | Messages) -> list[int]:
        return self.render(prompt) if is_chat(prompt) else self.encode(cast("Prompt", prompt))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a plain prompt: BOS where the model wants it, control tokens read as plain text."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if any(isinstance(token, bool) or not isinstance(token, int) for token in prompt):
            raise RequestError("a prompt is a text or a sequence of token ids (integers)", "prompt")
        return list(prompt)

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools = (),
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation, through the model's chat template; control tokens in messages are plain text.

        `options` are the template's own variables.
        """
        toolbox = make_toolbox(tools)
        return self._render(messages, toolbox, options, add_generation_prompt=add_generation_prompt).ids

    def _render(
        self, messages: Messages, toolbox: Toolbox, options: Mapping[str, Any], *, add_generation_prompt: bool = True
    ) -> RenderedPrompt:
        from unspool.chat.messages import check_messages, for_template

        check_messages(messages)
        valid = for_template(messages)
        return self.model_chat.prompt(valid, toolbox, options, add_generation_prompt=add_generation_prompt)

    # Running --------------------------------------------------------------------------------------------------------
    def _answer(self, jobs: Sequence[Job], output: Sequence[int] = ()) -> list[Result]:
        """The folded streams of some requests, which run as one batch."""
        streams = [
            Stream(self.driver, ids, params or SamplingParams(), output=output, whole=True) for ids, params in jobs
        ]
        try:
            Stream.start(self.driver, streams)
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def receipt(self, seed: int) -> Receipt:
        return self.engine.receipt(seed)

    def close(self) -> None:
        """Abort what runs and end the engine's thread; later calls raise EngineClosedError."""
        self.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_chat(prompt: Prompt | Messages) -> TypeGuard[Messages]:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def make_toolbox(tools: Tools, choice: ToolChoice = "auto", parallel: bool = True) -> Toolbox:
    from unspool.chat.tools import check_tools, read_toolbox

    check_tools(tools, choice)
    return read_toolbox(tools, choice, parallel=parallel)


def make_config(options: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from keyword arguments; one that it does not know is refused by name."""
    known = set(EngineConfig.__dataclass_fields__)
    for name in options:
        if name not in known:
            raise RequestError(f"unknown option {name!r}; known: {', '.join(sorted(known))}", name)
    return EngineConfig(**options)


def _spread(params: Any, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    each = list(params)
    if len(each) != count:
        raise RequestError(f"{count} prompts came with {len(each)} params; give one, or one for each", "params")
    return each

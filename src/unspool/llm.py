"""LLM: a model in this process, for any number of threads. `generate` collects the events of `stream`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar, Unpack, cast, overload

from unspool.engine.driver import Driver
from unspool.engine.engine import Engine
from unspool.engine.streams import Generation, Stream
from unspool.errors import RequestError
from unspool.events import Token
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.options import (
    Batch,
    ChatOptions,
    EachParams,
    EngineOptions,
    GenerateOptions,
    JsonSchema,
    Messages,
    Params,
    Prompt,
    SamplingOptions,
    ToolChoice,
    Tools,
    configured_options,
    engine_config,
    sampling_params,
)
from unspool.params import SamplingParams
from unspool.progress import tracked
from unspool.results import Receipt, Result
from unspool.weights.store import resolve

if TYPE_CHECKING:
    from unspool.ceilings import Utilization
    from unspool.chat.model_chat import ModelChat, RenderedPrompt
    from unspool.chat.template import ChatTemplate
    from unspool.chat.tools import Toolbox
    from unspool.text.tokenizer import Tokenizer

T = TypeVar("T")


class TextModel:
    """The part of a model that turns text into tokens, without weights."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
        self.checkpoint, self.tokenizer = checkpoint, tokenizer

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, created on first use, so that completion does not need it."""
        from unspool.chat.template import template_of

        return template_of(self.checkpoint, self.tokenizer)

    @cached_property
    def model_chat(self) -> ModelChat:
        """The chat format of this model."""
        from unspool.chat.model_chat import ModelChat

        return ModelChat(self.checkpoint.name, self.tokenizer, self.template)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; control tokens have none.

        >>> llm.decode([504, 6376])
        'The sky'
        """
        return self.tokenizer.decode(self.encode(ids))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: with BOS if the model uses it; control tokens in the text are read as characters.

        >>> llm.encode("The sky")
        [504, 6376]
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | Mapping):
            hint = "; a conversation goes to chat() or stream()" if isinstance(prompt, Mapping) else ""
            raise RequestError(f"a prompt is a text or a sequence of token ids, not {prompt!r:.80}{hint}", "prompt")
        tokens = list(prompt)
        for index, token in enumerate(tokens):
            if not _is_token(token):
                raise RequestError(f"prompt[{index}] is {token!r:.80}; a token id is an integer", "prompt")
        return [int(token) for token in tokens]

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools = (),
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
    ) -> list[int]:
        """Token ids of a conversation, through the model's chat template; control tokens in messages are plain text.

        `template_options` are variables of the template, such as `enable_thinking`. The ids end where the answer
        begins. If the last message is the assistant's, they end with it, so that it is continued, unless the other
        options say otherwise.

        >>> ids = llm.render([{"role": "user", "content": "Hello"}])
        >>> llm.generate(ids, max_tokens=8, temperature=0).text
        'Hello! How can I help you today'
        """
        options, box = template_options or {}, make_toolbox(tools)
        return self._render(messages, box, options, add_generation_prompt, continue_final_message).ids

    def _render(
        self,
        messages: Messages,
        toolbox: Toolbox,
        options: Mapping[str, Any],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
    ) -> RenderedPrompt:
        from unspool.chat.messages import check_messages, for_template

        check_messages(messages)
        return self.model_chat.prompt(
            for_template(messages),
            toolbox,
            options,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )


class Model(TextModel):
    """The common base of `LLM` and `AsyncLLM`: everything that does not wait for an answer."""

    def __init__(
        self,
        model: str | Path | Checkpoint = "smollm2",
        *,
        on_progress: Callable[[float], None] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        configured = configured_options(model) if isinstance(model, str) else {}
        config = engine_config(cast("EngineOptions", {**configured, **options}))
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(resolve(model))
        checkpoint = checkpoint.with_overrides(config)  # including its tokenizer
        self.engine = Engine(checkpoint, config, tokenizer=checkpoint.tokenizer, on_progress=on_progress)
        assert self.engine.tokenizer is not None  # it was just created
        super().__init__(self.engine.checkpoint, self.engine.tokenizer)  # quantized, if requested
        self.driver = Driver(self.engine)

    def receipt(self, seed: int) -> Receipt:
        """The receipt of an answer with this seed: what it depends on, in addition to its prompt and parameters.

        >>> llm.receipt(7).version == unspool.__version__
        True
        """
        return self.engine.receipt(seed)

    def utilization(self, result: Result) -> Utilization | None:
        """The shares of this machine's ceilings that an answer (of several: the first) reached, including the work of
        its steps for other requests. None: the ceilings were never measured (`unspool plan` measures them).

        >>> used = llm.utilization(llm.generate("The sky is", max_tokens=16))
        >>> used is None or 0 < used.mbu
        True
        """
        from unspool.ceilings import known_ceilings, utilization

        backend = self.engine.ops.name
        limits = None if backend == "reference" else known_ceilings(backend, self.engine.config.threads)
        if limits is None:
            return None
        first = result.choices[0]
        return utilization(self.engine.steps.costs, first.usage, first.timings, first.work, limits)

    # What is to be generated ----------------------------------------------------------------------------------------
    def _many(
        self, prompts: Prompt | Batch, params: EachParams, options: SamplingOptions, schema: Any = None
    ) -> tuple[list[Generation], bool]:
        """The prompts with the parameters of each, and whether there are several."""
        self.driver.check_open()
        many = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | bytearray | Mapping)
        each: list[Any] = list(prompts) if many else [prompts]
        if many and each and _is_token(each[0]):
            many, each = False, [each]
        parse, shaped = _shaped(schema)
        return [
            Generation(tuple(self.encode(prompt)), shaped(one), parse=parse)
            for prompt, one in zip(each, _per_prompt(len(each), params, options), strict=True)
        ], many

    def _chats(
        self,
        messages: Messages | Sequence[Messages],
        params: EachParams,
        options: SamplingOptions,
        toolbox: Toolbox,
        template_options: Mapping[str, Any] | None,
        schema: Any,
    ) -> tuple[list[Generation], bool]:
        """The conversations with the parameters of each, and whether there are several."""
        self.driver.check_open()
        many = _is_batch_of_chats(messages)
        each: list[Any] = list(messages) if many else [messages]
        parse, shaped = _shaped(schema)
        return [
            replace(self._chat(chat, shaped(one), toolbox, template_options or {}), parse=parse)
            for chat, one in zip(each, _per_prompt(len(each), params, options), strict=True)
        ], many

    def _one(
        self,
        prompt: Prompt | Messages,
        asked: SamplingParams,
        tools: Tools = (),
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        template_options: Mapping[str, Any] | None = None,
        schema: Any = None,
    ) -> Generation:
        """The answer to a prompt, or to a conversation."""
        self.driver.check_open()
        parse, shaped = _shaped(schema)
        asked = shaped(asked)
        if is_chat(prompt):
            toolbox = make_toolbox(tools, tool_choice, parallel_tool_calls)
            return replace(self._chat(prompt, asked, toolbox, template_options or {}), parse=parse)
        for name, value in (("tools", tools), ("template_options", template_options)):
            if value:
                raise RequestError(f"{name} are for a conversation, a list of messages", name)
        return Generation(tuple(self.encode(cast("Prompt", prompt))), asked, parse=parse)

    def _chat(
        self, messages: Messages, asked: SamplingParams, toolbox: Toolbox, options: Mapping[str, Any]
    ) -> Generation:
        self.driver.check_open()  # first, because in a forked process rendering could wait for the parent's threads
        chat = self.model_chat
        if toolbox.binds:
            if asked.constraint is not None:
                raise RequestError("constraint and tools bind the answer twice", "constraint")
            asked = replace(asked, constraint=chat.constraint(toolbox))
        prompt = self._render(messages, toolbox, options)
        return Generation(
            tuple(prompt.ids),
            chat.with_thinking(asked, prompt, toolbox),
            is_chat=not prompt.is_continued,
            prompt_warnings=prompt.warnings,
            syntax=chat.syntax(toolbox, prompt.begins, keeps_marks=not asked.skip_special_tokens),
        )

    def _score(self, text: Prompt, top: int) -> Generation:
        return Generation(tuple(self.encode(text)), SamplingParams(max_tokens=0, prompt_logprobs=top))

    def _fork(
        self, result: Result, index: int, token: int | None, params: Params, choice: int, options: SamplingOptions
    ) -> Generation:
        if not 0 <= choice < len(result.choices):
            raise RequestError(f"choice is {choice}; the result has {len(result.choices)}", "choice")
        kept = result.choices[choice].token_ids
        if not 0 <= index <= len(kept):
            raise RequestError(f"index is {index}; the answer has {len(kept)} tokens", "index")
        output = kept[:index] + ([] if token is None else [token])
        if params is None:
            params = result.params.request(seed=result.choices[choice].seed, n=1, best_of=1)
        return Generation(result.prompt_ids, sampling_params(params, options), output, is_chat=result.is_chat)


class LLM(Model):
    """A model, ready to answer, from any thread.

    >>> llm = LLM()                          # the default model, fetched once
    >>> llm.generate("The capital of France is", max_tokens=2, temperature=0).text
    ' Paris.'

    `model` is a name ("smollm2"), a GGUF file, a Hugging Face directory or a hub id; options are EngineConfig's.
    `on_progress` is called with the share of the weights that is loaded, and loading is then complete when the model is
    returned; without it, loading continues until the first answer. Sampling parameters are given as a SamplingParams,
    as a dictionary of its fields, by name, or as both: names take precedence.
    """

    # Generating -----------------------------------------------------------------------------------------------------
    @overload
    def generate(
        self, prompts: Prompt, params: Params = None, *, schema: type[T], **options: Unpack[GenerateOptions]
    ) -> Result[T]: ...
    @overload
    def generate(
        self,
        prompts: Prompt,
        params: Params = None,
        *,
        schema: JsonSchema | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result[Any]: ...
    @overload
    def generate(
        self, prompts: Batch, params: EachParams = None, *, schema: type[T], **options: Unpack[GenerateOptions]
    ) -> list[Result[T]]: ...
    @overload
    def generate(
        self,
        prompts: Batch,
        params: EachParams = None,
        *,
        schema: JsonSchema | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Result[Any]]: ...
    def generate(
        self,
        prompts: Prompt | Batch,
        params: EachParams = None,
        *,
        schema: Any = None,
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Result | list[Result]:
        """Answer one prompt (text or token ids), or many as one continuous batch, each with its own parameters.

        `schema`, a dataclass, a pydantic model or a JSON schema, constrains answers to JSON; `result.parsed` is the
        value. `progress` shows how many of several answers are finished: True, False, or None (if stderr is a
        terminal).

        >>> llm.generate("The capital of France is", max_tokens=2, temperature=0).text
        ' Paris.'
        >>> places = ("France", "Italy")
        >>> results = llm.generate([f"The capital of {place} is" for place in places], max_tokens=2, temperature=0)
        >>> [result.text for result in results]
        [' Paris.', ' Rome.']
        """
        generations, many = self._many(prompts, params, options, schema)
        results = self._answer(generations, progress=progress)
        return results if many else results[0]

    @overload
    def chat(
        self, messages: Messages, params: Params = None, *, schema: type[T], **options: Unpack[ChatOptions]
    ) -> Result[T]: ...
    @overload
    def chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        schema: JsonSchema | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result[Any]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: EachParams = None,
        *,
        schema: type[T],
        **options: Unpack[ChatOptions],
    ) -> list[Result[T]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: EachParams = None,
        *,
        schema: JsonSchema | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Result[Any]]: ...
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: EachParams = None,
        *,
        tools: Tools = (),
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        template_options: Mapping[str, Any] | None = None,
        schema: Any = None,
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Result | list[Result]:
        """Answer a conversation, a list of {"role": …, "content": …}, or a list of conversations as one batch.

        `tools` and `tool_choice` are in OpenAI's form; the calls that the model makes are `result.tool_calls`.
        `template_options` are variables of the model's chat template, such as `enable_thinking`. If the last message
        is the assistant's, the answer continues it, from its `token_ids` if it has them. `schema` and `progress`
        are those of `generate`.

        >>> messages = [{"role": "user", "content": "Name a planet."}]
        >>> llm.chat(messages, max_tokens=5, temperature=0).text
        'The planet is called Kepler'
        >>> Person = dataclasses.make_dataclass("Person", [("name", str), ("age", int)])
        >>> llm.chat([{"role": "user", "content": "Bob is 47 years old."}], schema=Person, temperature=0).parsed
        Person(name='Bob', age=47)
        """
        toolbox = make_toolbox(tools, tool_choice, parallel_tool_calls)
        generations, many = self._chats(messages, params, options, toolbox, template_options, schema)
        results = self._answer(generations, whole=toolbox.parallel, progress=progress)
        return results if many else results[0]

    def stream(
        self,
        prompt: Prompt | Messages,
        params: Params = None,
        *,
        tools: Tools = (),
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        template_options: Mapping[str, Any] | None = None,
        schema: Any = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """The events of an answer as they arrive: Text, then Finished for each choice. A failure is raised.

        A list of messages is a chat; with tools, `stream.messages` has the content and the calls of each choice so far.
        `stream.result()` is what `generate` or `chat` would have returned. Closing or dropping the stream aborts it.

        >>> stream = llm.stream("Once upon a time", max_tokens=4, temperature=0)
        >>> for event in stream:
        ...     print(getattr(event, "text", "|"), end="")
        , the city of|
        >>> stream.result().text
        ', the city of'
        """
        asked = sampling_params(params, options)
        generation = self._one(prompt, asked, tools, tool_choice, parallel_tool_calls, template_options, schema)
        stream = Stream(self.driver, generation)
        Stream.start(self.driver, [stream])
        return stream

    def score(self, text: Prompt, top: int = 0) -> list[Token | None]:
        """The logprob of each token of a text given those before it, in one pass; None for the first.

        `top` is the number of likeliest tokens to report for each.

        >>> [token and token.rank for token in llm.score("The sky is blue")]
        [None, 4222, 2, 14]
        """
        scored = self._answer([self._score(text, top)])[0].prompt_logprobs
        assert scored is not None
        return scored

    def score_many(self, texts: Sequence[Prompt], top: int = 0) -> list[list[Token | None]]:
        """`score` of several texts, which run as one batch.

        >>> [len(tokens) for tokens in llm.score_many(["The sky is blue", "The sky"])]
        [4, 2]
        """
        results = self._answer([self._score(text, top) for text in texts])
        return [result.prompt_logprobs or [] for result in results]

    def fork(
        self,
        result: Result,
        index: int,
        token: int | None = None,
        params: Params = None,
        choice: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> Result:
        """Continue the answer differently from its token `index`: with `token` there, or with other parameters.

        Without `params` the parameters and the seed are kept, so the same tokens follow if the prefix is the same. The
        computed prefix is shared, not computed again.

        >>> result = llm.generate("The capital of France is", max_tokens=5, temperature=0)
        >>> [lyon] = llm.encode(" Lyon")
        >>> llm.fork(result, 0, lyon).text
        ' Lyon.\\n\\nThe'
        """
        return self._answer([self._fork(result, index, token, params, choice, options)])[0]

    def _answer(
        self, generations: Sequence[Generation], *, whole: bool = True, progress: bool | None = False
    ) -> list[Result]:
        """The results of some requests, which run as one batch. Without `whole`, each event is handled when it arrives,
        for an answer that ends with its first tool call."""
        streams = [Stream(self.driver, each, whole=whole) for each in generations]
        try:
            Stream.start(self.driver, streams)
            return list(tracked((stream.result() for stream in streams), len(streams), progress))
        finally:
            for stream in streams:
                stream.close()

    # Keeping --------------------------------------------------------------------------------------------------------
    def save_state(self, path: str | Path, prompt: Prompt | Messages) -> int:
        """Compute a prompt and write its keys and values to a file, in whole cache blocks; returns the number of
        tokens.

        >>> llm.save_state(folder / "story", "Once upon a time there was a king. " * 8)
        64
        """
        from unspool.engine import state

        generation = self._one(prompt, SamplingParams(max_tokens=0))
        self._answer([generation])
        return self.driver.call(lambda engine: state.save(engine, generation.prompt_ids, Path(path)))

    def load_state(self, path: str | Path) -> int:
        """Load a saved prompt into the prefix cache; returns the number of tokens that it saves computing.

        >>> saved = llm.save_state(folder / "tale", "Once upon a time there was a queen. " * 8)
        >>> llm.load_state(folder / "tale")
        64
        """
        from unspool.engine import state

        return len(self.driver.call(lambda engine: state.load(engine, Path(path))))

    def close(self) -> None:
        """Abort running requests and end the engine's thread; later calls raise EngineClosedError. `with` calls it.

        >>> with LLM() as llm:
        ...     text = llm.generate("The sky is", max_tokens=4).text
        """
        self.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _per_prompt(count: int, params: EachParams, options: SamplingOptions) -> list[SamplingParams]:
    if not isinstance(params, Sequence):
        return [sampling_params(params, options)] * count
    if len(params) == count:
        return [sampling_params(one, options) for one in params]
    raise RequestError(f"{count} prompts and {len(params)} params; give one, or one for each", "params")


def _shaped(schema: Any) -> tuple[Callable[[str], Any] | None, Callable[[SamplingParams], SamplingParams]]:
    """A parser of answers with a schema, and a function that adds the schema's constraint to parameters."""
    if schema is None:
        return None, lambda asked: asked
    from unspool.params import Constraint
    from unspool.schemas import answer_type

    shape = answer_type(schema)

    def bind(asked: SamplingParams) -> SamplingParams:
        if asked.constraint is not None:
            raise RequestError("constraint and schema bind the answer twice", "schema")
        return replace(asked, constraint=Constraint("json_schema", shape.schema))

    return shape.parse, bind


def _is_batch_of_chats(messages: Any) -> bool:
    """Whether it is a list of conversations; an empty list is a conversation, which is refused."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    return is_list and len(messages) > 0 and isinstance(messages[0], list | tuple)


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's integers are Integral too


def is_chat(prompt: Prompt | Messages) -> TypeGuard[Messages]:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def make_toolbox(tools: Tools, choice: ToolChoice = "auto", parallel: bool = True) -> Toolbox:
    from unspool.chat.tools import check_tools, read_toolbox

    check_tools(tools, choice)
    return read_toolbox(tools, choice, parallel=parallel)

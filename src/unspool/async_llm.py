"""AsyncLLM: `LLM` for event loops. Requests of all tasks run in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

from unspool.engine.streams import AsyncStream, Generation, start_async
from unspool.events import Token
from unspool.llm import Model, make_toolbox
from unspool.options import (
    Batch,
    ChatOptions,
    EachParams,
    GenerateOptions,
    JsonSchema,
    Messages,
    Params,
    Prompt,
    SamplingOptions,
    ToolChoice,
    Tools,
    sampling_params,
)
from unspool.params import SamplingParams
from unspool.progress import tracked
from unspool.results import Result

T = TypeVar("T")


class AsyncLLM(Model):
    """A model, ready to answer in event loops. Methods and arguments are those of `LLM`.

    >>> async def capitals(*places):
    ...     async with AsyncLLM() as llm:
    ...         prompts = [f"The capital of {place} is" for place in places]
    ...         return await asyncio.gather(*(llm.generate(prompt, max_tokens=2, temperature=0) for prompt in prompts))
    >>> [result.text for result in asyncio.run(capitals("France", "Italy"))]
    [' Paris.', ' Rome.']

    The constructor loads the model and takes a while; tokenizing a long prompt may too. A cancelled task aborts its
    request.
    """

    # Generating -----------------------------------------------------------------------------------------------------
    @overload
    async def generate(
        self, prompts: Prompt, params: Params = None, *, schema: type[T], **options: Unpack[GenerateOptions]
    ) -> Result[T]: ...
    @overload
    async def generate(
        self,
        prompts: Prompt,
        params: Params = None,
        *,
        schema: JsonSchema | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result[Any]: ...
    @overload
    async def generate(
        self, prompts: Batch, params: EachParams = None, *, schema: type[T], **options: Unpack[GenerateOptions]
    ) -> list[Result[T]]: ...
    @overload
    async def generate(
        self,
        prompts: Batch,
        params: EachParams = None,
        *,
        schema: JsonSchema | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Result[Any]]: ...
    async def generate(
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
        """
        generations, many = self._many(prompts, params, options, schema)
        results = await self._answer(generations, progress=progress)
        return results if many else results[0]

    @overload
    async def chat(
        self, messages: Messages, params: Params = None, *, schema: type[T], **options: Unpack[ChatOptions]
    ) -> Result[T]: ...
    @overload
    async def chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        schema: JsonSchema | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result[Any]: ...
    @overload
    async def chat(
        self,
        messages: Sequence[Messages],
        params: EachParams = None,
        *,
        schema: type[T],
        **options: Unpack[ChatOptions],
    ) -> list[Result[T]]: ...
    @overload
    async def chat(
        self,
        messages: Sequence[Messages],
        params: EachParams = None,
        *,
        schema: JsonSchema | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Result[Any]]: ...
    async def chat(
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
        """Answer a conversation, or a list of conversations as one batch. The arguments are those of `LLM.chat`."""
        toolbox = make_toolbox(tools, tool_choice, parallel_tool_calls)
        generations, many = self._chats(messages, params, options, toolbox, template_options, schema)
        results = await self._answer(generations, whole=toolbox.parallel, progress=progress)
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
    ) -> AsyncStream:
        """The events of an answer as they arrive: Text, then Finished for each choice. A failure is raised.

        The request is sent when the stream is first read, entered with `async with`, or started with
        `await stream.start()`. Closing or dropping the stream aborts it.
        """
        asked = sampling_params(params, options)
        generation = self._one(prompt, asked, tools, tool_choice, parallel_tool_calls, template_options, schema)
        return AsyncStream(self.driver, generation)

    async def score(self, text: Prompt, top: int = 0) -> list[Token | None]:
        """The logprob of each token of a text given those before it, in one pass; None for the first."""
        scored = (await self._answer([self._score(text, top)]))[0].prompt_logprobs
        assert scored is not None
        return scored

    async def score_many(self, texts: Sequence[Prompt], top: int = 0) -> list[list[Token | None]]:
        """`score` of several texts, which run as one batch."""
        results = await self._answer([self._score(text, top) for text in texts])
        return [result.prompt_logprobs or [] for result in results]

    async def fork(
        self,
        result: Result,
        index: int,
        token: int | None = None,
        params: Params = None,
        choice: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> Result:
        """Continue the answer differently from its token `index`: see `LLM.fork`."""
        return (await self._answer([self._fork(result, index, token, params, choice, options)]))[0]

    async def _answer(
        self, generations: Sequence[Generation], *, whole: bool = True, progress: bool | None = False
    ) -> list[Result]:
        streams = [AsyncStream(self.driver, each, whole=whole) for each in generations]
        try:
            await start_async(self.driver, streams)
            results = []
            for _, stream in zip(tracked(streams, len(streams), progress), streams, strict=True):
                results.append(await stream.result())
            return results
        finally:
            for stream in streams:
                await stream.aclose()

    # Keeping --------------------------------------------------------------------------------------------------------
    async def save_state(self, path: str | Path, prompt: Prompt | Messages) -> int:
        """Compute a prompt and write its keys and values to a file; returns the number of tokens."""
        from unspool.engine import state

        generation = self._one(prompt, SamplingParams(max_tokens=0))
        await self._answer([generation])
        return await self.driver.call_async(lambda engine: state.save(engine, generation.prompt_ids, Path(path)))

    async def load_state(self, path: str | Path) -> int:
        """Load a saved prompt into the prefix cache; returns the number of tokens that it saves computing."""
        from unspool.engine import state

        return len(await self.driver.call_async(lambda engine: state.load(engine, Path(path))))

    async def aclose(self, drain: float = 0.0) -> None:
        """Accept no new requests, let running ones finish for `drain` seconds, abort the rest and end the thread."""
        await self.driver.shutdown(drain)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

"""The interface that a server needs from a model: an LLM in this process, or a pool of replicas in others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from unspool.engine.driver import Submission
from unspool.errors import EngineDiedError
from unspool.events import FinishReason
from unspool.results import Receipt

if TYPE_CHECKING:
    from unspool.chat.model_chat import ModelChat
    from unspool.chat.template import ChatTemplate
    from unspool.config import EngineConfig
    from unspool.models.checkpoint import Checkpoint
    from unspool.text.tokenizer import Tokenizer


class Submitter(Protocol):
    """Accepts requests and passes their events on: see Driver."""

    @property
    def failure(self) -> EngineDiedError | None: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def num_open(self) -> int:
        """Requests that were accepted and have not ended."""

    async def start_async(self, submissions: Sequence[Submission]) -> None: ...
    def abort(self, submission: Submission, reason: FinishReason = "abort") -> None: ...
    async def shutdown(self, drain: float = 0.0) -> None: ...


class ServedEngine(Protocol):
    """The figures of the engine that computes."""

    @property
    def context_length(self) -> int: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def stats(self) -> Mapping[str, float]: ...


class ServedModel(Protocol):
    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def template(self) -> ChatTemplate | None: ...
    @property
    def model_chat(self) -> ModelChat: ...
    @property
    def engine(self) -> ServedEngine: ...
    @property
    def driver(self) -> Submitter: ...
    def receipt(self, seed: int) -> Receipt: ...
    def encode(self, prompt: str) -> list[int]: ...

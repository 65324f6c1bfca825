"""unspool: an inference engine for language models whose answers are reproducible, explainable and fast.

    from unspool import LLM, SamplingParams
    print(LLM().chat([{"role": "user", "content": "Why is the sky blue?"}]).text)

Names are loaded when first used, so that `import unspool` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unspool.async_llm import AsyncLLM
    from unspool.chat.answers import ToolCall
    from unspool.config import EngineConfig, ModelConfig
    from unspool.drafter import Draft, DraftContext, Drafter
    from unspool.engine.streams import AsyncStream, Stream
    from unspool.errors import (
        BackendError,
        ContextLengthError,
        EngineClosedError,
        EngineError,
        ModelError,
        ParseError,
        QueueFullError,
        RequestError,
        UnspoolError,
    )
    from unspool.events import Event, Failed, Finished, Text, Timings, Token, Usage
    from unspool.llm import LLM
    from unspool.options import EngineOptions
    from unspool.params.declared import SamplingOptions
    from unspool.params.order import PRESETS, Preset
    from unspool.params.rules import LogitStage, StageState, StopRule, StopState
    from unspool.params.sampling import SamplingParams
    from unspool.params.values import BeamParams, Constraint, RepetitionDetector
    from unspool.results import Completion, Receipt, Result

_HOMES = {
    "unspool.chat.answers": ("ToolCall",),
    "unspool.config": ("EngineConfig", "ModelConfig"),
    "unspool.drafter": ("Draft", "DraftContext", "Drafter"),
    "unspool.errors": (
        "BackendError",
        "ContextLengthError",
        "EngineClosedError",
        "EngineError",
        "ModelError",
        "ParseError",
        "QueueFullError",
        "RequestError",
        "UnspoolError",
    ),
    "unspool.events": ("Event", "Failed", "Finished", "Text", "Timings", "Token", "Usage"),
    "unspool.llm": ("LLM",),
    "unspool.async_llm": ("AsyncLLM",),
    "unspool.engine.streams": ("AsyncStream", "Stream"),
    "unspool.options": ("EngineOptions",),
    "unspool.params.declared": ("SamplingOptions",),
    "unspool.params.order": ("PRESETS", "Preset"),
    "unspool.params.rules": ("LogitStage", "StageState", "StopRule", "StopState"),
    "unspool.params.sampling": ("SamplingParams",),
    "unspool.params.values": ("BeamParams", "Constraint", "RepetitionDetector"),
    "unspool.results": ("Completion", "Receipt", "Result"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 (grouped as a reader meets them)
    "LLM",
    "AsyncLLM",
    "Stream",
    "AsyncStream",
    "SamplingParams",
    "SamplingOptions",
    "Constraint",
    "BeamParams",
    "RepetitionDetector",
    "PRESETS",
    "Preset",
    "LogitStage",
    "StageState",
    "StopRule",
    "StopState",
    "Drafter",
    "DraftContext",
    "Draft",
    "EngineConfig",
    "EngineOptions",
    "ModelConfig",
    "Result",
    "Completion",
    "ToolCall",
    "Receipt",
    "Event",
    "Text",
    "Token",
    "Finished",
    "Failed",
    "Usage",
    "Timings",
    "UnspoolError",
    "RequestError",
    "ContextLengthError",
    "QueueFullError",
    "ModelError",
    "ParseError",
    "EngineError",
    "BackendError",
    "EngineClosedError",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from unspool.version import VERSION

        return VERSION
    if name not in _HOME_OF:
        raise AttributeError(f"module 'unspool' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

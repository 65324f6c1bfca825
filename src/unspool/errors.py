"""Every failure that unspool reports, as one tree.

    UnspoolError
    ├── RequestError(param)          the caller asked for something impossible: HTTP 4xx
    │   ├── ContextLengthError       the prompt does not fit the model
    │   └── QueueFullError           too many are waiting; try again later
    ├── ModelError                   a model file, directory or name is unusable
    └── EngineError                  the engine itself failed: HTTP 5xx
        ├── BackendError             a device, driver, library or kernel is missing
        ├── EngineClosedError        the engine was shut down
        ├── EngineDiedError          the engine's thread ended by an error; nothing more can be computed
        ├── ReplicaLostError         a replica died or fell silent, and no other one can take over
        ├── ReplayError              another replica computed a different answer
        └── SamplingError            logits that are NaN or infinite
"""

from __future__ import annotations


class UnspoolError(Exception):
    """The root: catch this to catch everything that unspool raises on purpose."""


class RequestError(UnspoolError):
    """A request that cannot be honoured; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ParseError(UnspoolError):
    """An answer that is no value of the type that was asked for: as a rule it was cut short."""


class ContextLengthError(RequestError):
    """The prompt is longer than the model (or the cache) can hold."""

    def __init__(self, message: str, param: str | None = "prompt") -> None:
        super().__init__(message, param, "context_length_exceeded")


class QueueFullError(RequestError):
    """The waiting queue is at its bound; nothing was queued."""

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "queue_full")


class ModelError(UnspoolError):
    """A model that cannot be found, read or understood; the message names the file or tensor."""


class EngineError(UnspoolError):
    """The engine failed through no fault of the request."""


class BackendError(EngineError):
    """A device cannot be used; the message says what is missing and how to get it."""


class EngineClosedError(EngineError):
    """The engine was shut down while, or before, the request ran."""


class EngineDiedError(EngineError):
    """The engine's thread ended by an error that is not one request's; only a new engine can compute again."""


class ReplicaLostError(EngineError):
    """A replica died or fell silent in the middle of an answer, and no other one can take over."""


class ReplayError(EngineError):
    """A replica was lost, and the one that computed the answer again does not compute the same."""


class SamplingError(EngineError):
    """The model gave NaN or infinite logits; it fails the one request, and the message has the position."""

"""Errors as HTTP responses: a status and a body, in OpenAI's format or in Anthropic's."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from unspool.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDiedError,
    ModelError,
    QueueFullError,
    ReplayError,
    ReplicaLostError,
    RequestError,
    UnspoolError,
)

log = logging.getLogger("unspool.server")


class HTTPFault(UnspoolError):
    """A request that is refused before its fields are read: for its path, its key, its size."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        type: str | None = None,
    ) -> None:
        """`type`: OpenAI's error type, where the status does not imply it."""
        super().__init__(message)
        self.status, self.code, self.headers, self.type = status, code, headers or {}, type


@dataclass(frozen=True)
class Fault:
    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def openai(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = _TYPES | {413: "request_too_large", 503: "overloaded_error"}


def fault_of(error: BaseException, *, retry_after: int = 1) -> Fault:
    """The response to an error. Messages of UnspoolErrors are shown to the caller; other errors are only logged."""
    message = str(error)
    again = (("retry-after", str(retry_after)),)
    if isinstance(error, HTTPFault):
        by_status = "server_error" if error.status >= 500 else "invalid_request_error"
        kind = error.type or _TYPES.get(error.status, by_status)
        return Fault(error.status, message, kind, None, error.code, tuple(error.headers.items()))
    if isinstance(error, QueueFullError):
        return Fault(429, message, "rate_limit_error", None, error.code, again)
    if isinstance(error, ContextLengthError):
        return Fault(400, message, "invalid_request_error", error.param, error.code)
    if isinstance(error, RequestError):
        return Fault(400, message, "invalid_request_error", error.param, error.code or "invalid_value")
    if isinstance(error, EngineClosedError):
        return Fault(503, message, "server_error", None, "shutting_down", again)
    if isinstance(error, EngineDiedError):  # logged when it died, not again for each request
        return Fault(503, message, "server_error", None, "engine_died")
    if isinstance(error, ReplicaLostError):
        log.error("a request failed: %s", message)
        return Fault(503, message, "server_error", None, "replica_lost", again)
    if isinstance(error, ReplayError):
        log.error("a request failed: %s", message)
        return Fault(500, message, "server_error", None, "replay_differs")
    if isinstance(error, UnspoolError) and not isinstance(error, ModelError):
        log.error("a request failed: %s", message)
        return Fault(500, message, "server_error", None, "engine_error")
    log.error("a defect: %s: %s", type(error).__name__, message, exc_info=error)
    return Fault(500, f"an internal error ({type(error).__name__})", "server_error", None, "internal_error")

"""A client of any OpenAI-compatible server, for measurements: when each piece came, and what went wrong, never a hang.

The standard library alone, so that a benchmark costs little beside the server that it shares the cores with. Every
wait has a limit; a failure becomes part of the result.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from unspool.errors import BackendError, RequestError

MOST_HEAD, MOST_LINE = 1 << 16, 1 << 22  # bytes


@dataclass(frozen=True)
class Endpoint:
    """A server: http://host:port, with or without a path such as /v1."""

    url: str
    key: str | None = None
    timeout: float = 120.0  # of a whole request
    connect_timeout: float = 10.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"{self.url!r} is not the address of a server, as in http://127.0.0.1:8000", "url")

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    def path(self, name: str) -> str:
        """Of an endpoint of the API: "completions" -> "/v1/completions"."""
        base = urlsplit(self.url).path.rstrip("/")
        return f"{base if base.endswith('/v1') else base + '/v1'}/{name}"

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        secure = ssl.create_default_context() if self.url.startswith("https:") else None
        return await asyncio.open_connection(self.host, self.port, ssl=secure, limit=MOST_LINE)


@dataclass
class Reply:
    """What came of a request. Times are seconds after it was sent."""

    text: str = ""
    arrivals: list[float] = field(default_factory=list)  # of events that brought text
    ended: float = 0.0
    tokens: int | None = None  # of the answer, as the server counts them
    finish_reason: str | None = None
    error: str | None = None  # why there is no answer: "status 503", "timeout", "refused", …
    token_ids: list[Any] = field(default_factory=list)  # ids or texts of tokens, where the server sends them

    @property
    def num_tokens(self) -> int:
        """Without a server's count, one for each event."""
        return self.tokens if self.tokens is not None else len(self.arrivals)

    @property
    def first(self) -> float | None:
        return self.arrivals[0] if self.arrivals else None

    @property
    def between(self) -> float | None:
        """Mean seconds between tokens after the first."""
        if len(self.arrivals) < 2 or self.num_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)


async def get_json(endpoint: Endpoint, name: str) -> Any:
    """What GET of a path of the API returns."""
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(endpoint.connect_timeout):
            status = await _exchange(endpoint, "GET", name, None, parts.append)
    except (OSError, _BadResponse) as error:
        raise BackendError(f"{endpoint.url} does not answer: {describe(error)}") from None
    if status != 200:
        raise BackendError(f"{endpoint.url} answered {name} with status {status}")
    try:
        return json.loads(b"".join(parts))
    except ValueError:
        raise BackendError(f"{endpoint.url} answered {name} with something that is not JSON") from None


async def model_of(endpoint: Endpoint) -> str:
    """The first model that a server lists."""
    listed = await get_json(endpoint, "models")
    try:
        return str(listed["data"][0]["id"])
    except (LookupError, TypeError):
        raise BackendError(f"{endpoint.url} lists no model; name one with --model") from None


async def ask(endpoint: Endpoint, name: str, body: Mapping[str, Any]) -> Reply:
    """POST a request and read its answer to the end, streamed or whole. Never raises for what a server does."""
    reply, start = Reply(), time.perf_counter()
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(endpoint.timeout):
            if body.get("stream"):
                reader = _StreamReader(reply, start)
                status = await _exchange(endpoint, "POST", name, body, reader.push)
                if status == 200 and reply.error is None and not reader.is_complete:
                    reply.error = "the stream broke off"
            else:
                status = await _exchange(endpoint, "POST", name, body, parts.append)
                if status == 200:
                    _read_whole(reply, b"".join(parts))
                    reply.arrivals = [time.perf_counter() - start]
        if status != 200:
            reply.error = f"status {status}"
    except (OSError, _BadResponse) as error:
        reply.error = describe(error)
    reply.ended = time.perf_counter() - start
    return reply


def describe(error: BaseException) -> str:
    """A failure in a few words that are the same for all of its kind, so that they can be counted."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "connection lost"
    return str(error) or type(error).__name__


# HTTP ---------------------------------------------------------------------------------------------------------------
class _BadResponse(Exception):
    pass


async def _exchange(
    endpoint: Endpoint, method: str, name: str, body: Mapping[str, Any] | None, push: Callable[[bytes], None]
) -> int:
    """One request on a connection of its own; `push` gets the body of a 200 as it comes. Returns the status."""
    async with asyncio.timeout(endpoint.connect_timeout):
        reader, writer = await endpoint.open()
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = [f"{method} {endpoint.path(name)} HTTP/1.1", f"host: {endpoint.host}:{endpoint.port}"]
        head += ["content-type: application/json", f"content-length: {len(data)}", "connection: close"]
        if endpoint.key is not None:
            head.append(f"authorization: Bearer {endpoint.key}")
        writer.write("\r\n".join([*head, "", ""]).encode() + data)
        await writer.drain()
        status, headers = await _head(reader)
        if status == 200:
            async for piece in _pieces(reader, headers):
                push(piece)
        return status
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
        first, *lines = raw[:MOST_HEAD].decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(first.split()[1]), headers
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError):
        raise _BadResponse("no HTTP response") from None


async def _pieces(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    try:
        if "chunked" in headers.get("transfer-encoding", ""):
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
        elif "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
        else:
            while piece := await reader.read(1 << 16):
                yield piece
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        raise _BadResponse("the response broke off") from None


# Bodies -------------------------------------------------------------------------------------------------------------
class _StreamReader:
    """Server-sent events, as they come."""

    def __init__(self, reply: Reply, start: float) -> None:
        self._reply, self._start, self._line = reply, start, b""
        self.is_complete = False

    def push(self, piece: bytes) -> None:
        now = time.perf_counter() - self._start
        *lines, self._line = (self._line + piece).split(b"\n")
        if len(self._line) > MOST_LINE:
            raise _BadResponse("a line without an end")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.is_complete = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise _BadResponse("an event that is not JSON") from None
        if not isinstance(event, dict) or event.get("error"):
            self._reply.error = f"error in the stream: {str(event)[:200]}"
            return
        had = len(self._reply.text)
        _read_event(self._reply, event)
        if len(self._reply.text) > had:
            self._reply.arrivals.append(now)
        self.is_complete = self.is_complete or self._reply.finish_reason is not None


def _read_whole(reply: Reply, raw: bytes) -> None:
    try:
        _read_event(reply, json.loads(raw))
    except ValueError:
        reply.error = "an answer that is not JSON"


def _read_event(reply: Reply, event: Any) -> None:
    """Add what an object of the API says. One of another shape is an error of the reply's."""
    try:
        for choice in event.get("choices") or ():
            _read_choice(reply, choice)
        usage = event.get("usage") or {}
        if isinstance(usage.get("completion_tokens"), int):
            reply.tokens = usage["completion_tokens"]
    except (AttributeError, TypeError):
        reply.error = "an answer of another shape"


def _read_choice(reply: Reply, choice: Any) -> None:
    message = choice.get("delta") or choice.get("message") or {}
    for text in (choice.get("text"), message.get("reasoning_content"), message.get("content")):
        reply.text += text if isinstance(text, str) else ""
    reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    logprobs = choice.get("logprobs") or {}
    reply.token_ids += logprobs.get("tokens") or [each.get("token") for each in logprobs.get("content") or ()]

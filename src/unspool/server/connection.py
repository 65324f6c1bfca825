"""One client's connection, with limits that apply before anything from the client is trusted.

    connected ──first byte──► head ──complete──► body, answer ──► idle ──► head ──► …
        └──header_timeout──┴──header_timeout, max_header           └──idle_timeout

uvicorn's protocol does the rest: parsing, pipelining, calling the application.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from unspool.server.faults import HTTPFault, fault_of
from unspool.server.sse import dumps

if TYPE_CHECKING:
    from unspool.server.listener import Gate

MAX_HEADERS = 128  # lines of one head: each costs more memory than its bytes
MAX_PIPELINED = 16  # requests that wait behind one that is being answered
LINGER = 2.0  # seconds for a client to finish sending data that is discarded
PROBES = (b"/health", b"/ready")  # answered on connections beyond the limit too


class Connection(HttpToolsProtocol):
    def __init__(self, gate: Gate, **given: Any) -> None:
        super().__init__(**given)
        self._gate, self._limits = gate, gate.config
        self._is_surplus = False  # beyond the limit: probes are answered, other requests are refused
        self._is_reading_head = self._is_reading_body = False
        self._is_refused = False  # nothing more is read
        self._refusal: HTTPFault | None = None  # why a parser callback stopped the parser
        self._head_size = 0
        self._num_unparsed = 0  # bytes of heads, frames and trailers since the last complete head or body data
        self._stalled_size = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}

    # Time -----------------------------------------------------------------------------------------------------------
    def _start_timer(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        self._stop_timer(name)
        self._timers[name] = self.loop.call_later(seconds, act)

    def _stop_timer(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _on_late_head(self) -> None:
        seconds = self._limits.header_timeout
        if self._is_answering:  # the late request is a pipelined one behind the current one
            self._start_timer("head", seconds, self._on_late_head)
        elif self._is_reading_head:
            message = f"the request's head did not arrive within {seconds:g} s"
            self._refuse(HTTPFault(408, message, code="request_timeout"))
        else:
            self._gate.log_limit("connections that sent nothing within %g s were closed", seconds)
            self._close()

    def _on_stall(self) -> None:
        """Close the connection if its client has read nothing since the last check."""
        size = self.transport.get_write_buffer_size()
        if size < self._stalled_size:
            self._stalled_size = size
            self._start_timer("stall", self._limits.stall_timeout, self._on_stall)
        else:
            self._gate.log_limit("readers that took nothing for %g s were cut", self._limits.stall_timeout)
            self.transport.abort()

    # The transport's calls ------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_surplus = not self._gate.has_room_for(self)
        self._start_timer("head", self._limits.header_timeout, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop_timer(name)
        self._gate.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_unparsed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is supported; the request was handled as HTTP
        except httptools.HttpParserError:
            if self._is_refused:
                return
            self._refuse(self._refusal or HTTPFault(400, "what was sent is not HTTP", code="invalid_http"))
            return
        if self._num_unparsed > self._limits.max_header:
            self._refuse(self._large_head())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_size = self.transport.get_write_buffer_size()
        self._start_timer("stall", self._limits.stall_timeout, self._on_stall)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("stall")

    # The parser's calls ---------------------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        self._stop_timer("idle")
        super().on_message_begin()
        self._head_size = 0
        self._is_reading_head = True
        self._start_timer("head", self._limits.header_timeout, self._on_late_head)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_reading_head:  # else it is a trailer, which is ignored
            self._count_head(len(name) + len(value) + len(": \r\n"))
            super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self._limits.max_header or len(self.headers) >= MAX_HEADERS:
            self._stop_parsing(self._large_head())

    def _large_head(self) -> HTTPFault:
        most = f"{self._limits.max_header:,} bytes and {MAX_HEADERS} lines"
        return HTTPFault(431, f"the request's head is too large; at most {most} are taken", code="headers_too_large")

    def on_headers_complete(self) -> None:
        self._is_reading_head, self._is_reading_body, self._num_unparsed = False, True, 0
        self._stop_timer("head")
        if self._is_surplus and len(self._gate) > self._gate.most and self.url.partition(b"?")[0] not in PROBES:
            message = f"{self._gate.most:,} connections are open, and more are not taken"
            self._stop_parsing(HTTPFault(503, message, code="too_many_connections", headers={"retry-after": "1"}))
        if len(self.pipeline) >= MAX_PIPELINED:
            self._is_refused = True
            self.pipeline[0][0].keep_alive = False  # waiting requests are answered, then it closes
            raise ValueError("too many requests wait on this connection")
        self._gate.set_busy(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed = 0
        self._is_reading_body = False
        self._stop_timer("end")
        super().on_message_complete()

    def _stop_parsing(self, fault: HTTPFault) -> None:
        self._refusal = fault
        raise fault  # the parser catches it and raises its own error

    # Ending ---------------------------------------------------------------------------------------------------------
    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        goes_on = bool(self.pipeline)
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_timer("end", self._limits.stall_timeout, self.transport.abort)
        elif not goes_on:
            self._unset_keepalive_if_required()  # uvicorn would restart it with every byte, whatever it is
            self._start_timer("idle", self._limits.idle_timeout, self._close)
            self._gate.set_idle(self)
            if self._is_reading_body and not self._is_reading_head:
                self._start_timer("end", LINGER, self._close)

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._start_timer("end", LINGER, self.transport.abort)

    def _close(self) -> None:
        """Close when the client has read all output, or after LINGER seconds."""
        self.transport.close()
        self._start_timer("end", LINGER, self.transport.abort)

    def _refuse(self, refusal: HTTPFault) -> None:
        """Answer with an error and stop reading. Closes when the client has read it, or after LINGER seconds."""
        self._is_refused = True
        self._gate.log_limit(f"connections were refused: {refusal}")
        self._stop_timer("head")
        if self._is_answering or not self.transport.can_write_eof():
            self._close()
            return
        fault = fault_of(refusal)
        body = dumps(fault.openai())
        lines = [f"HTTP/1.1 {fault.status} {HTTPStatus(fault.status).phrase}", "content-type: application/json"]
        lines += [f"content-length: {len(body)}", "connection: close", *(f"{k}: {v}" for k, v in fault.headers)]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.write_eof()
        self._start_timer("end", LINGER, self.transport.abort)

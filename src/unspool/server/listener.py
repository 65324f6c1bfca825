"""Accepting connections: limits on their number, and what happens beyond them or when descriptors run out."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from unspool.errors import EngineError, RequestError
from unspool.server.config import ServerConfig
from unspool.server.connection import Connection

log = logging.getLogger("unspool.server")
BACKLOG = 512  # connections that the system queues until they are accepted
BATCH = 32  # accepted in one turn of the event loop
SURPLUS = 16  # connections beyond the limit, for probes
SPARE_DESCRIPTORS = 32  # for everything else that the process opens
RETRY_SECONDS = 0.5  # after descriptors ran out
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class LimitLog:
    """Warnings that any client can cause: each kind is logged at once, then at most once a minute with a count."""

    EVERY = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._num_silent: dict[str, int] = {}

    def __call__(self, message: str, *values: Any) -> None:
        now = self._clock()
        if now - self._last.get(message, -self.EVERY) < self.EVERY:
            self._num_silent[message] = self._num_silent.get(message, 0) + 1
            return
        more = self._num_silent.pop(message, 0)
        self._last[message] = now
        log.warning(message + (f" ({more:,} more since the last such line)" if more else ""), *values)


class Gate:
    """All open connections. Beyond the limit, the longest idle one is closed."""

    def __init__(self, config: ServerConfig, most: int) -> None:
        self.config, self.most = config, most
        self.log_limit = LimitLog()
        self.on_leave: Callable[[], None] = lambda: None
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # in the order in which they became so

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_shut(self) -> bool:
        return len(self._open) >= self.most + SURPLUS

    def enter(self, connection: Connection) -> None:
        self._open.add(connection)

    def has_room_for(self, connection: Connection) -> bool:
        """Whether a connection that was made is within the limit, perhaps because an idle one was closed for it."""
        self._idle[connection] = None
        if len(self._open) <= self.most:
            return True
        self.log_limit("the limit of %d connections is reached: idle ones are closed, others refused", self.most)
        oldest = next(iter(self._idle))
        if oldest is connection:
            return False
        oldest.transport.abort()
        self.leave(oldest)
        return True

    def set_busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def leave(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        if connection in self._open:
            self._open.remove(connection)
            self.on_leave()


class Listener:
    """Accepts connections on some sockets, a few in each turn of the event loop, and none while the gate is shut."""

    def __init__(self, sockets: list[socket.socket], gate: Gate, make: Callable[[], Connection]) -> None:
        self.sockets = sockets
        self._gate, self._make = gate, make
        self._loop = asyncio.get_running_loop()
        self._attaching: set[asyncio.Task[None]] = set()
        self._paused: set[socket.socket] = set()
        self._is_closed = False
        gate.on_leave = self._resume
        for one in sockets:
            self._listen(one)
            self._loop.add_reader(one, self._accept, one)

    def _listen(self, one: socket.socket) -> None:
        try:
            one.listen(BACKLOG)
        except OSError as error:  # another process has bound the same port and listens on it
            host, port = one.getsockname()[:2]
            raise RequestError(_why_not_bound(f"{host} port {port}", error), "port") from error
        one.setblocking(False)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(BATCH):
            if self._gate.is_shut:
                self._pause(listening)
                return
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                self._gate.log_limit("connections must wait: %s", error.strerror)
                self._pause(listening)
                self._loop.call_later(RETRY_SECONDS, self._resume)
                return
            accepted.setblocking(False)
            with suppress(OSError):  # it has gone already
                # asyncio does this for sockets that it opens itself. Without it the second part of an answer waits for
                # the client to acknowledge the first: 40 ms for every request of a kept connection.
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = self._make()
            self._gate.enter(connection)
            task = self._loop.create_task(self._attach(accepted, connection))
            self._attaching.add(task)
            task.add_done_callback(self._attaching.discard)

    async def _attach(self, accepted: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # it has gone already
            self._gate.leave(connection)
            accepted.close()

    def _pause(self, listening: socket.socket) -> None:
        self._paused.add(listening)
        self._loop.remove_reader(listening)

    def _resume(self) -> None:
        if self._paused and not self._is_closed and not self._gate.is_shut:
            for one in self._paused:
                self._loop.add_reader(one, self._accept, one)
            self._paused.clear()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for one in self.sockets:
                self._loop.remove_reader(one)
                one.close()

    async def wait_closed(self) -> None:
        if self._attaching:
            await asyncio.wait(self._attaching)


def bind(host: str, port: int) -> list[socket.socket]:
    """A bound socket for every address of a host, not listening yet. Port 0: any free port, the same for all of
    them."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"host is {host!r}, which has no address: {error}", "host") from error
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            one = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            port = one.getsockname()[1]
    except OSError as error:
        for one in sockets:
            one.close()
        raise RequestError(_why_not_bound(f"{host} port {port}", error), "port") from error
    return sockets


def _why_not_bound(where: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use by another process; --port takes another one, 0 a free one"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{where} cannot be listened on: this machine has no such address; see --host"
    return f"{where} cannot be listened on: {error.strerror}"


def fit_descriptors(wanted: int) -> int:
    """The number of connections, at most `wanted`, that the process has descriptors for; raises the process's limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SURPLUS + _num_descriptors() + SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < needed and soft != hard:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(ValueError, OSError):  # some systems allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    fits = wanted - max(0, needed - soft)
    if fits < 1:
        raise EngineError(f"this process may open {soft} files, too few to serve; raise its limit (ulimit -n)")
    if fits < wanted:
        log.warning("this process may open %d files: at most %d connections, not %d", soft, fits, wanted)
    return fits


def _num_descriptors() -> int:
    for path in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(path):
            return len(os.listdir(path))
    return 64

"""sd_notify: status messages to systemd, as datagrams to the socket that NOTIFY_SOCKET names.

    EXTEND_TIMEOUT_USEC…  while a model loads      READY=1  once requests are accepted

    WATCHDOG=1…           while the engines live    STOPPING=1  when a signal has come

Without NOTIFY_SOCKET nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

log = logging.getLogger("unspool.server")
LOADING_SECONDS = 10.0  # between two messages during a load
LOADING_EXTENSION = 60.0  # the time that each of them adds to the timeout


class Notifier:
    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read the environment of a service. A wrong value turns its feature off, with a warning."""
        self._address = self._read_address(environment.get("NOTIFY_SOCKET", ""))
        self.watchdog_seconds = self._read_watchdog(environment)
        self._is_warned = False

    @property
    def is_wanted(self) -> bool:
        return self._address is not None

    def _read_address(self, given: str) -> str | None:
        if given.startswith("@"):
            return "\0" + given[1:]  # of Linux's abstract namespace
        if given and not given.startswith("/"):
            log.warning("NOTIFY_SOCKET is %r, neither a path nor an abstract socket: nothing is told to it", given)
            return None
        return given or None

    def _read_watchdog(self, environment: Mapping[str, str]) -> float | None:
        """The watchdog interval of the service manager; None: no watchdog."""
        pid, interval = environment.get("WATCHDOG_PID"), environment.get("WATCHDOG_USEC", "")
        if self._address is None or not interval or (pid is not None and pid != str(os.getpid())):
            return None
        if not (interval.isascii() and interval.isdecimal() and int(interval) > 0):
            log.warning("WATCHDOG_USEC is %r; a whole number from 1 is needed: no sign of life is sent", interval)
            return None
        return int(interval) / 1e6

    def send(self, **values: str | int) -> None:
        """Send variables in one datagram. A failure gives one warning, and the service continues."""
        if self._address is None:
            return
        text = "\n".join(f"{name}={value}" for name, value in values.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.connect(self._address)
                sender.send(text.encode())
        except OSError as error:
            if not self._is_warned:
                self._is_warned = True
                log.warning("the service manager cannot be told anything: %s", error.strerror or error)

    def ready(self, status: str) -> None:
        self.send(READY=1, STATUS=status)

    def stopping(self) -> None:
        self.send(STOPPING=1, STATUS="letting answers finish")

    @contextmanager
    def starting(self) -> Iterator[Callable[[str], None]]:
        """Extend the start timeout until the yielded function is called or the block ends. Call the function with the
        served address when the service is ready."""
        ended = threading.Event()

        def report() -> None:
            while not ended.is_set():
                self.send(EXTEND_TIMEOUT_USEC=int(LOADING_EXTENSION * 1e6), STATUS="loading")
                ended.wait(LOADING_SECONDS)

        def ready(address: str) -> None:
            ended.set()
            thread.join()  # no message about loading after this
            self.ready(f"serving at {address}")

        if not self.is_wanted:
            yield lambda address: None
            return
        thread = threading.Thread(target=report, name="unspool-notify", daemon=True)
        thread.start()
        try:
            yield ready
        finally:
            ended.set()

    async def keep_alive(self, is_well: Callable[[], bool]) -> None:
        """Send watchdog messages while `is_well` is true. The service manager restarts a service that stops sending
        them."""
        if self.watchdog_seconds is None:
            return
        while is_well():
            self.send(WATCHDOG=1)
            await asyncio.sleep(self.watchdog_seconds / 2)


def notifier() -> Notifier:
    return Notifier(os.environ)

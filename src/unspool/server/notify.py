"""sd_notify: what a service tells systemd, in datagrams to the socket that NOTIFY_SOCKET names.

    EXTEND_TIMEOUT_USEC…  while a model loads      READY=1  once requests are taken
    WATCHDOG=1…           while the engines live    STOPPING=1  when a signal has come

Where nobody listens, nothing is sent.
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
LOADING_SECONDS = 10.0  # between two signs of life of a load
LOADING_EXTENSION = 60.0  # how much longer each of them lets it take


class Notifier:
    def __init__(self, environment: Mapping[str, str]) -> None:
        """What the environment of a service says. Wrong values turn off what they are about, with a warning."""
        self._address = self._read_address(environment.get("NOTIFY_SOCKET", ""))
        self.watchdog_seconds = self._read_watchdog(environment)
        self._is_warned = False

    @property
    def is_wanted(self) -> bool:
        return self._address is not None

    def _read_address(self, told: str) -> str | None:
        if told.startswith("@"):
            return "\0" + told[1:]  # of Linux's abstract namespace
        if told and not told.startswith("/"):
            log.warning("NOTIFY_SOCKET is %r, neither a path nor an abstract socket: nothing is told to it", told)
            return None
        return told or None

    def _read_watchdog(self, environment: Mapping[str, str]) -> float | None:
        """How often the service manager wants to hear of this process; None: not at all."""
        pid, told = environment.get("WATCHDOG_PID"), environment.get("WATCHDOG_USEC", "")
        if self._address is None or not told or (pid is not None and pid != str(os.getpid())):
            return None
        if not (told.isascii() and told.isdecimal() and int(told) > 0):
            log.warning("WATCHDOG_USEC is %r; a whole number from 1 is needed: no sign of life is sent", told)
            return None
        return int(told) / 1e6

    def send(self, **values: str | int) -> None:
        """Send variables in one datagram. What cannot be sent is one warning: the service goes on without."""
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
        """Have the start take as long as it takes, until the function that this gives is called or the block ends. It
        is called with the address that is served, and says that the service is ready."""
        ended = threading.Event()

        def tell() -> None:
            while not ended.is_set():
                self.send(EXTEND_TIMEOUT_USEC=int(LOADING_EXTENSION * 1e6), STATUS="loading")
                ended.wait(LOADING_SECONDS)

        def ready(address: str) -> None:
            ended.set()
            thread.join()  # nothing is said of loading after this
            self.ready(f"serving at {address}")

        if not self.is_wanted:
            yield lambda address: None
            return
        thread = threading.Thread(target=tell, name="unspool-notify", daemon=True)
        thread.start()
        try:
            yield ready
        finally:
            ended.set()

    async def keep_alive(self, is_well: Callable[[], bool]) -> None:
        """Send signs of life as long as all is well. The service manager restarts a service without them."""
        if self.watchdog_seconds is None:
            return
        while is_well():
            self.send(WATCHDOG=1)
            await asyncio.sleep(self.watchdog_seconds / 2)


def notifier() -> Notifier:
    return Notifier(os.environ)

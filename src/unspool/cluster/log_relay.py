"""Lines of logs from the processes of a local Ray to the terminal of the command that started it.

Serve keeps what a replica logs in files of its own. Someone who runs `unspool serve` looks at the terminal instead.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from pathlib import Path

MAX_LINE = 32 * 1024  # bytes; what is longer is cut


class LogSender(logging.Handler):
    """Sends each line to a relay. One that the relay has no room for is dropped: a reader never holds up a server."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # it may have ended
            self._socket.sendto(self.format(record).encode()[:MAX_LINE], self._path)


class LogRelay:
    """Writes lines that other processes send to stderr, until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.settimeout(0.5)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                line = self._socket.recv(MAX_LINE)
            except TimeoutError:
                continue
            sys.stderr.write(line.decode("utf-8", "replace") + "\n")
            sys.stderr.flush()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        self._socket.close()

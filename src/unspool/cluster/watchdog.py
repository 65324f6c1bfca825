"""Ends a replica that is stopped or hung as a whole: neither Serve nor Ray can, for the signal by which they do has to
be handled by the process itself. Its memory would stay taken.

    python -S -E watchdog.py SECONDS     stdin is a pipe to which the parent writes a byte every second

Run as a file of its own, so that the process imports nothing and stays small.
"""

from __future__ import annotations

import os
import select
import signal
import sys

BEAT = 1.0


def start(seconds: float) -> None:
    """Have this process killed when it has been hung for so long. The child ends with this process."""
    import subprocess
    import threading
    import time

    command = [sys.executable, "-S", "-E", __file__, str(seconds)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert child.stdin is not None
    pipe = child.stdin.fileno()

    def beat() -> None:
        while child.poll() is None:
            try:
                os.write(pipe, b".")
            except OSError:  # it was killed
                return
            time.sleep(BEAT)

    threading.Thread(target=beat, name="unspool-watchdog", daemon=True).start()


def main(seconds: float) -> None:
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        is_alive = bool(select.select([0], [], [], seconds)[0])
        if is_alive and not os.read(0, 4096):
            return  # the parent has ended
        if os.getppid() != parent:
            return
        if not is_alive:
            os.kill(parent, signal.SIGKILL)
            return


if __name__ == "__main__":
    main(float(sys.argv[1]))

"""What cleans up after processes that cannot do so themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HANG = 600.0


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def watched(seconds: float) -> subprocess.Popen[bytes]:
    code = "import sys, time\nfrom unspool.cluster import watchdog\nwatchdog.start(float(sys.argv[1]))\n"
    process = start(code + "print('ready', flush=True)\ntime.sleep(1000)", str(seconds))
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def children(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def wait_until_gone(processes: list[int]) -> None:
    until = time.monotonic() + HANG
    while any(map(is_there, processes)):
        assert time.monotonic() < until, processes
        time.sleep(0.05)


def test_a_stopped_process_is_killed_and_its_watchdog_ends() -> None:
    process = watched(2.0)
    dogs = children(process.pid)
    assert len(dogs) == 1
    os.kill(process.pid, signal.SIGSTOP)
    assert process.wait(HANG) == -signal.SIGKILL
    wait_until_gone(dogs)


def test_a_watchdog_ends_with_its_process() -> None:
    process = watched(30.0)
    dogs = children(process.pid)
    process.kill()
    process.wait(HANG)
    wait_until_gone(dogs)


def test_a_process_whose_watchdog_was_killed_goes_on() -> None:
    process = watched(30.0)
    (dog,) = children(process.pid)
    os.kill(dog, signal.SIGKILL)
    time.sleep(1.5)  # more than a beat
    assert process.poll() is None
    process.kill()
    process.wait(HANG)


JANITOR = """
import subprocess, sys, time
folder = sys.argv[1]
left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', folder])
janitor = subprocess.Popen([sys.executable, '-P', '-m', 'unspool.cluster.janitor', folder], stdin=subprocess.PIPE)
print(left.pid, janitor.pid, flush=True)
sys.stdin.readline()
left.kill()
left.wait()
janitor.stdin.close()
print(janitor.wait(), flush=True)
"""


def test_a_janitor_ends_what_a_killed_process_left(tmp_path: Path) -> None:
    folder = tmp_path / "of-ray"
    folder.mkdir()
    process = start(JANITOR, str(folder))
    assert process.stdout is not None
    left, janitor = map(int, process.stdout.readline().split())
    process.kill()
    process.wait(HANG)
    wait_until_gone([left, janitor])
    assert not folder.exists()


def test_a_janitor_lets_a_process_that_ends_in_order_be(tmp_path: Path) -> None:
    folder = tmp_path / "of-ray"
    folder.mkdir()
    process = start(JANITOR, str(folder))
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"0\n"  # though the folder is on its own command line
    assert process.wait(HANG) == 0
    assert not folder.exists()

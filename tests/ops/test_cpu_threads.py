"""Threads that the system does not give, and processes that are forked while a step is computed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from tests.ops.conftest import make_batch
from tests.ops.test_cpu_programs import compiled, with_ids
from unspool.config import EngineConfig
from unspool.errors import EngineError
from unspool.models.random import SHAPES, random_checkpoint
from unspool.ops.cpu import CpuOps

MANY_THREADS = """
import resource
from unspool.errors import BackendError
from unspool.ops.cpu import CpuOps
size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, ((size << 10) + (300 << 20),) * 2)
try:
    CpuOps(threads=1000)
except BackendError as error:
    print(error)
print(CpuOps(threads=2).threads)
"""


def test_threads_that_cannot_be_started_are_told_with_numbers() -> None:
    """Address space for some of their stacks alone. Those that were started end, and fewer can be had after it."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_THREADS], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith("threads is 1,000, but only ")
    assert " of 1000 threads could be started" in first
    assert second == "2"


def status_in_child(work: Callable[[], int]) -> int:
    """What a forked child's work gives, or minus the signal that ended it: SIGALRM if it hangs."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(600)
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_forked_amid_a_step_is_refused_and_may_load_the_model_itself() -> None:
    checkpoint = random_checkpoint(SHAPES["tiny"], format="q8_0")
    batch = with_ids(make_batch([(0, 1000, range(32))], 32), np.arange(1000) % 300)
    step = compiled(CpuOps(threads=2), checkpoint, EngineConfig().with_device_defaults("cpu"))
    wanted = np.array(step.run(batch))
    leave = threading.Event()

    def keep_stepping() -> None:
        while not leave.is_set():
            step.run(batch)

    def try_step() -> int:
        try:
            found = step.run(batch)
        except EngineError as error:
            return 1 if "forked while the model computed a step" in str(error) else 3
        return 0 if np.array_equal(found, wanted) else 2

    def load_anew() -> int:
        again = compiled(CpuOps(threads=2), checkpoint, EngineConfig().with_device_defaults("cpu"))
        return 0 if np.array_equal(again.run(batch), wanted) else 2

    thread = threading.Thread(target=keep_stepping)
    thread.start()
    try:
        statuses = []
        for _ in range(50):
            time.sleep(0.002)  # the other thread is in a step then, most often
            statuses.append(status_in_child(try_step))
            if statuses[-1]:
                break
        assert statuses[-1] == 1
        assert not any(statuses[:-1])
        time.sleep(0.002)
        assert status_in_child(load_anew) == 0
    finally:
        leave.set()
        thread.join()
    assert np.array_equal(step.run(batch), wanted)


def test_two_models_take_turns_on_one_pool() -> None:
    """More threads than cores, so that some come late to rows that every thread copies for itself. Under
    `make test-sanitize SANITIZE=thread` this finds whoever writes over a row that is still being copied."""
    checkpoints = [random_checkpoint(SHAPES["tiny"], format=format) for format in ("q8_0", "q4_1")]
    steps = [compiled(CpuOps(threads=5), each, EngineConfig().with_device_defaults("cpu")) for each in checkpoints]
    batches = [make_batch([(position, 1, [0, 1])], 32) for position in range(40)]
    wanted = [[np.array(step.run(batch)) for batch in batches] for step in steps]
    found: list[list[np.ndarray]] = [[], []]

    def run(index: int) -> None:
        found[index] = [np.array(steps[index].run(batch)) for batch in batches]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))

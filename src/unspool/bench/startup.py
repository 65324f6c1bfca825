"""How long a start takes: importing unspool, `unspool --version`, and a process's start to its first token.

Each number is the wall time of whole processes, measured from outside, after one that is not counted: files are in
memory and Python's bytecode is written, as an installed package has it. Rounds are interleaved, so that a busy machine
slows everything alike, and medians are reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from unspool.reporting import Run

PROMPT = "Why is the sky blue?"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def wall(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    return time.perf_counter() - start


def first_token(command: Sequence[str]) -> float:
    """Until the first byte of an answer is there to be read."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode or not first:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return seconds


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="unspool bench startup", description=__doc__)
    parser.add_argument("-m", "--model", default="smollm2", help="the model that answers (smollm2)")
    parser.add_argument("--rounds", type=int, default=7, help="processes of each kind (7)")
    parser.add_argument("--device", default="auto", help="as for unspool run (auto)")
    options = parser.parse_args(argv)
    record = Run("startup", argv, is_here=False)
    # -P: nothing is imported from the working directory
    python, unspool = [sys.executable, "-P"], [sys.executable, "-P", "-m", "unspool"]
    run = [*unspool, "run", PROMPT, "-m", options.model, "--device", options.device, "-n", "2", "-q"]
    first_token(run)  # the one that is not counted
    measures = {
        "python": lambda: wall([*python, "-c", "pass"]),
        "import": lambda: wall([*python, "-c", "import unspool"]),
        "version": lambda: wall([*unspool, "--version"]),
        "first_token": lambda: first_token(run),
    }
    times: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(options.rounds):
        for name, measure in measures.items():
            times[name].append(measure())
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name:<12} median {1000 * medians[name]:7.1f} ms   best {1000 * min(values):7.1f} ms")
    print(f"importing unspool alone: {1000 * (medians['import'] - medians['python']):.1f} ms")
    return record.finish({"model": options.model, "rounds": options.rounds, "seconds": times})

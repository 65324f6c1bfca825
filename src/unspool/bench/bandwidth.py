"""How fast this machine reads memory: the limit of every decoding step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from unspool.machine import measure_bandwidth, num_cores
from unspool.reporting import Run


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="unspool bench bandwidth", description=__doc__)
    parser.add_argument("--threads", type=int, help="threads; without it one, then all")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number of threads (2)")
    options = parser.parse_args(argv)
    run = Run("bandwidth", argv)
    report = {}
    for threads in [options.threads] if options.threads else sorted({1, num_cores()}):
        found = measure_bandwidth(threads, seconds=options.seconds)
        report[str(threads)] = found.bytes_per_second / 1e9
        print(f"{threads:>3} threads  {found.bytes_per_second / 1e9:6.1f} GB/s")
    return run.finish({"gb_per_second": report})

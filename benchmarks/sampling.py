"""What choosing a token costs, for each row on one core, beside llama.cpp's and transformers' own pipelines.

Every engine gets the same rows, in turns, so that drift of the machine affects all alike. Ours is timed as in
`unspool bench sampling`; llama.cpp's without copying the logits into its array.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from benchmarks.peer import Process
from unspool.bench import sampling
from unspool.reporting import check_plot


class Peer(Process):
    """Another engine in a process of its own."""

    def __init__(self, name: str, python: str, rows: Path, history: Path) -> None:
        script = Path(__file__).with_name("sampling_peers.py")
        super().__init__([python, str(script), name, str(rows), str(history)])
        self.answer()

    def run(self, case: str, count: int) -> list[float]:
        times: list[float] = self.ask(f"{case} {count}")
        return times


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sampling", description=__doc__)
    sampling.add_options(parser)
    parser.add_argument("--llama-python", help="a Python that has llama_cpp")
    parser.add_argument("--transformers-python", help="a Python that has transformers")
    options = parser.parse_args(argv)
    check_plot(options.plot)
    rows, history = sampling.inputs(options.vocab_size)
    runners = sampling.our_runners(rows, history, reference=options.reference)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as peers:
        paths = Path(folder) / "rows.npy", Path(folder) / "history.npy"
        for path, array in zip(paths, (rows, history), strict=True):
            np.save(path, array)
        for name, python in (("llama.cpp", options.llama_python), ("transformers", options.transformers_python)):
            if python:
                runners[name] = peers.enter_context(closing(Peer(name, python, *paths))).run
        result = sampling.report(runners, options)
    print(json.dumps({"benchmark": "sampling", **result}))
    return 0

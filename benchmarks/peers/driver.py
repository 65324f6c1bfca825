"""One engine in a process of its own, measured on request: run by `python -m benchmarks cpu`, not by hand.

    python driver.py NAME OPTIONS      NAME: a module via_NAME beside this file; OPTIONS: JSON

loads the engine, computes the first token of OPTIONS["text"] (or its "ids"), and says so with a line. Then every line
`{"work": "decode", "prompts": [[id, …], …], "steps": n}` or `{"work": "prefill", "prompts": [[…]]}` is answered with
{"seconds": s}, and `{"work": "memory"}` with {"bytes": the most that the process ever held}. Needs only the engine.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, Protocol


class Engine(Protocol):
    """What a module via_NAME has under this name; made with OPTIONS."""

    version: str

    def first(self, text: str, ids: list[int]) -> None:
        """Compute the first token after a text; an engine without a tokenizer takes the ids."""

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from a prompt to its first token."""

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds for `steps` more tokens of each prompt, once each has its first; greedy, and no end ends it."""


def serve(name: str, options: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print what they like; only answers may reach the one who asks
    engine: Engine = importlib.import_module(f"via_{name}").Engine(options)
    engine.first(options["text"], options["ids"])
    print(json.dumps({"version": engine.version}), file=answers)
    for line in sys.stdin:
        print(json.dumps(_do(engine, json.loads(line))), file=answers)


def _do(engine: Engine, asked: dict[str, Any]) -> dict[str, float]:
    if asked["work"] == "memory":
        return {"bytes": _peak_bytes()}
    if asked["work"] == "prefill":
        return {"seconds": engine.prefill(asked["prompts"][0])}
    return {"seconds": engine.decode(asked["prompts"], asked["steps"])}


def _peak_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))

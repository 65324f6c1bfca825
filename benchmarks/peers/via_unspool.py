"""unspool itself, measured like its peers: through the public API, so that any version of it can be a peer."""

from __future__ import annotations

import time
from typing import Any

from unspool import LLM, SamplingParams
from unspool.version import VERSION


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        threads, isa, room = options["threads"], options["isa"], options["context"]
        self._llm = LLM(options["model"], device="cpu", threads=threads, isa=isa, kv_tokens=room)
        self.version = VERSION

    def first(self, text: str, ids: list[int]) -> None:
        self._llm.generate(text, SamplingParams(max_tokens=1, temperature=0))

    def prefill(self, prompt: list[int]) -> float:
        began = time.perf_counter()
        self._llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
        return time.perf_counter() - began

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        params = SamplingParams(max_tokens=1 + steps, temperature=0, ignore_eos=True)
        timings = [result.timings for result in self._llm.generate(prompts, params)]
        last_first = max(timing.first_token or 0.0 for timing in timings)
        return max(timing.total for timing in timings) - last_first

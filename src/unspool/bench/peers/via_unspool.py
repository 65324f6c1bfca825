"""unspool itself, through the same door as its peers: an LLM as a program would make one."""

from __future__ import annotations

import time
from typing import Any

from unspool.events import Text
from unspool.llm import LLM
from unspool.params import SamplingParams
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
        engine = self._llm.engine
        params = SamplingParams(max_tokens=1 + steps, temperature=0, ignore_eos=True)
        without_first = {engine.add(prompt, params) for prompt in prompts}
        while without_first:
            without_first -= {event.request for event in engine.step() if isinstance(event, Text)}
        began = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - began

"""OpenVINO GenAI, which reads a GGUF file itself and turns it into its own graph at every start."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as api


class Times(api.StreamerBase):
    """When each token came."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def write(self, token: Any) -> Any:
        count = 1 if isinstance(token, int) else len(token)
        self.times += [time.perf_counter()] * count
        return api.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        self._pipeline = api.LLMPipeline(options["model"], "CPU", INFERENCE_NUM_THREADS=options["threads"])
        self.version = f"openvino-genai {api.__version__}"

    def first(self, text: str, ids: list[int]) -> None:
        self._pipeline.generate(text, max_new_tokens=1, do_sample=False, apply_chat_template=False)

    def prefill(self, prompt: list[int]) -> float:
        return self._generate([prompt], 1)

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        if len(prompts) > 1:  # nobody streams a batch here: what more tokens cost more
            unseen = [prompt[::-1] for prompt in prompts]  # for it keeps the prefixes that it computed
            return self._generate(prompts, 1 + steps) - self._generate(unseen, 1)
        times = Times()
        self._generate(prompts, 1 + steps, times)
        return times.times[-1] - times.times[0]

    def _generate(self, prompts: list[list[int]], count: int, streamer: Times | None = None) -> float:
        ids = np.array(prompts, np.int64)
        inputs = api.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = api.GenerationConfig(max_new_tokens=count, do_sample=False, ignore_eos=True)
        began = time.perf_counter()
        result = self._pipeline.generate(inputs, config, streamer)
        seconds = time.perf_counter() - began
        if any(len(tokens) != count for tokens in result.tokens):
            raise RuntimeError(f"asked for {count} tokens, got {[len(tokens) for tokens in result.tokens]}")
        return seconds

"""llama.cpp through llama-cpp-python's binding of its C interface; the largest logit is found by numpy."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp as api
import numpy as np

SEQUENCES = 8
Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        self._quiet = api.llama_log_callback(lambda *_: None)  # kept: the library holds no reference
        api.llama_log_set(self._quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        self._options = options
        self._model = api.llama_model_load_from_file(options["model"].encode(), api.llama_model_default_params())
        self._vocab = api.llama_model_get_vocab(self._model)
        self._vocab_size = api.llama_vocab_n_tokens(self._vocab)
        self._batch = api.llama_batch_init(2048, 0, 1)
        self._contexts: dict[bool, Any] = {}
        flags = {part.partition("=")[0].strip(): part for part in api.llama_print_system_info().decode().split("|")}
        widest = next(name for name in ("AVX512", "AVX2", "AVX") if any(name in flag for flag in flags))
        self.version = f"llama-cpp-python {api.__version__}, {widest.lower()}"

    def first(self, text: str, ids: list[int]) -> None:
        data, room = text.encode(), len(text) + 8
        tokens = (api.llama_token * room)()
        count = api.llama_tokenize(self._vocab, data, len(data), tokens, room, True, True)
        self.prefill(list(tokens[:count]))

    def prefill(self, prompt: list[int]) -> float:
        context = self._empty(many=False)
        began = time.perf_counter()
        self._prompt(context, prompt, 0)
        return time.perf_counter() - began

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        context = self._empty(many=len(prompts) > 1)
        tokens = [self._prompt(context, prompt, number) for number, prompt in enumerate(prompts)]
        began = time.perf_counter()
        for step in range(steps):
            rows = [(t, len(prompts[i]) + step, i, True) for i, t in enumerate(tokens)]
            self._run(context, rows)
            tokens = [self._best(context, i) for i in range(len(tokens))]
        return time.perf_counter() - began

    def _empty(self, many: bool) -> Any:
        if many not in self._contexts:
            params = api.llama_context_default_params()
            params.n_ctx = self._options["context"]
            params.n_batch, params.n_ubatch, params.n_seq_max = 2048, 512, SEQUENCES if many else 1
            params.n_threads = params.n_threads_batch = self._options["threads"]
            params.kv_unified = False
            self._contexts[many] = api.llama_init_from_model(self._model, params)
        api.llama_memory_clear(api.llama_get_memory(self._contexts[many]), True)
        return self._contexts[many]

    def _prompt(self, context: Any, prompt: list[int], sequence: int) -> int:
        last = len(prompt) - 1
        self._run(context, [(token, i, sequence, i == last) for i, token in enumerate(prompt)])
        return self._best(context, -1)

    def _run(self, context: Any, rows: list[Row]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        status = api.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode answered {status} for {len(rows)} rows")

    def _best(self, context: Any, row: int) -> int:
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, row), shape=(self._vocab_size,))
        return int(logits.argmax())

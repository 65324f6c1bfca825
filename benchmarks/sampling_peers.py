"""Other engines' sampling, in their own environments: run by `python -m benchmarks sampling`, not by hand.

    python sampling_peers.py llama.cpp|transformers ROWS.npy HISTORY.npy

reads lines `case count`, answers each with a line of JSON: microseconds for each of `count` rows. Needs numpy and the
peer's package, never unspool.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Step = Callable[[np.ndarray], float]  # one row in, seconds out


def llama_cpp_cases(history: list[int], vocab_size: int) -> dict[str, Step]:
    """Its sampler chains in its default order. Copying logits into its array of candidates is not counted."""
    import ctypes

    import llama_cpp as api

    # 0.3.36's ctypes layout: id, logit, p.
    layout = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

    def chain(*samplers: Any) -> Any:
        whole = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        for sampler in samplers:
            api.llama_sampler_chain_add(whole, sampler)
        for token in history[-64:]:
            api.llama_sampler_accept(whole, token)
        return whole

    def step(whole: Any) -> Step:
        def run(row: np.ndarray) -> float:
            candidates = np.zeros(row.size, layout)
            candidates["id"] = np.arange(row.size)
            candidates["logit"] = row
            pointer = candidates.ctypes.data_as(ctypes.POINTER(api.llama_token_data))
            array = api.llama_token_data_array(pointer, row.size, -1, False)
            began = time.perf_counter()
            api.llama_sampler_apply(whole, ctypes.byref(array))
            return time.perf_counter() - began

        return run

    top_p, min_p = api.llama_sampler_init_top_p, api.llama_sampler_init_min_p
    temperature, dist = api.llama_sampler_init_temp, api.llama_sampler_init_dist
    return {
        "greedy": step(chain(api.llama_sampler_init_greedy())),
        "full": step(
            chain(
                api.llama_sampler_init_penalties(vocab_size, 64, 1.1, 0.1, 0.1),
                api.llama_sampler_init_top_k(50),
                top_p(0.95, 1),
                min_p(0.05, 1),
                temperature(0.7),
                dist(1),
            )
        ),
        "nucleus": step(chain(top_p(0.95, 1), temperature(0.7), dist(1))),
        "draw": step(chain(dist(1))),
    }


def transformers_cases(history: list[int], vocab_size: int) -> dict[str, Step]:
    """Its processors as `generate` lines them up (it has no frequency nor presence penalty), softmax, multinomial."""
    import torch
    import transformers as api

    torch.set_num_threads(1)
    ids = torch.tensor([history])

    def step(*processors: Any) -> Step:
        processor_list = api.LogitsProcessorList(list(processors))

        def run(row: np.ndarray) -> float:
            scores = torch.from_numpy(row[None].copy())
            began = time.perf_counter()
            probabilities = torch.softmax(processor_list(ids, scores), dim=-1)
            torch.multinomial(probabilities, 1).item()
            return time.perf_counter() - began

        return run

    def greedy(row: np.ndarray) -> float:
        scores = torch.from_numpy(row[None].copy())
        began = time.perf_counter()
        torch.argmax(scores, dim=-1).item()
        return time.perf_counter() - began

    temperature, top_p = api.TemperatureLogitsWarper(0.7), api.TopPLogitsWarper(0.95)
    full = (
        api.RepetitionPenaltyLogitsProcessor(1.1),
        temperature,
        api.TopKLogitsWarper(50),
        top_p,
        api.MinPLogitsWarper(0.05),
    )
    return {"greedy": greedy, "full": step(*full), "nucleus": step(temperature, top_p), "draw": step()}


def serve(peer: str, rows_path: str, history_path: str) -> None:
    rows, history = np.load(rows_path), np.load(history_path).tolist()
    cases = {"llama.cpp": llama_cpp_cases, "transformers": transformers_cases}[peer](history, rows.shape[1])
    print(json.dumps(sorted(cases)), flush=True)
    for line in sys.stdin:
        case, count = line.split()
        times = [1e6 * cases[case](rows[i % len(rows)]) for i in range(int(count))]
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])

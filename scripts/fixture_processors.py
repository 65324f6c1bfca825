"""transformers' logits processors over thousands of random rows: the oracle for every sampling stage it also has."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

STAGES: dict[str, Any] = {
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "no_repeat_ngram": NoRepeatNGramLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "typical_p": TypicalLogitsWarper,
    "epsilon_cutoff": EpsilonLogitsWarper,
    "eta_cutoff": EtaLogitsWarper,
}
CHANGES_VALUES = {"repetition_penalty", "temperature"}
NUDGED = {"top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}

SINGLE: dict[str, tuple[float, ...]] = {
    "top_k": (1, 5, 50, 199, 2000),
    "top_p": (0.1, 0.5, 0.8, 0.9, 0.95, 0.99),
    "min_p": (0.01, 0.05, 0.1, 0.3, 0.9),
    "typical_p": (0.1, 0.2, 0.5, 0.9, 0.95),
    "epsilon_cutoff": (3e-4, 1e-3, 0.02),
    "eta_cutoff": (3e-4, 2e-3, 0.02),
    "no_repeat_ngram": (1, 2, 3, 5),
}
VALUES: dict[str, tuple[float, ...]] = {
    "temperature": (0.3, 0.7, 1.5),
    "repetition_penalty": (0.8, 1.1, 1.3, 2.0),
}
TIES: dict[str, tuple[float, ...]] = {"top_k": (3, 10, 50), "min_p": (0.05, 0.5), "epsilon_cutoff": (0.001, 0.01)}
# In the order in which `generate` builds its list.
CHAINS: tuple[dict[str, float], ...] = (
    {"repetition_penalty": 1.2, "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"repetition_penalty": 1.1, "no_repeat_ngram": 3, "temperature": 1.3, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 100, "min_p": 0.1, "typical_p": 0.9},
)


def rows_module() -> Any:
    """The tests' own numpy-only generator, so that both sides read the same rows."""
    path = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "processor_rows.py"
    spec = importlib.util.spec_from_file_location("processor_rows", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make_cases() -> list[dict[str, Any]]:
    plans: list[tuple[dict[str, float], int, int, bool]] = []
    plans += [({name: value}, 100, 0, False) for name, values in SINGLE.items() for value in values]
    plans += [({name: value}, 40, 200, False) for name, values in VALUES.items() for value in values]
    plans += [({name: value}, 60, 200, True) for name, values in TIES.items() for value in values]
    plans += [(chain, 100, 0, False) for chain in CHAINS]
    cases = []
    for i, (stages, rows, vocab, ties) in enumerate(plans):
        size = vocab or (200, 333, 500, 777, 1000)[i % 5]
        ngram = "no_repeat_ngram" in stages
        shape = {"rows": rows, "vocab": size, "length": 40, "alphabet": 6 if ngram else size}
        cases.append({"stages": stages, "seed": 1000 + i, "ties": ties, **shape})
    return cases


def apply(stages: dict[str, float], history: np.ndarray, logits: np.ndarray) -> np.ndarray:
    chain = LogitsProcessorList([STAGES[name](value) for name, value in stages.items()])
    return chain(torch.from_numpy(history), torch.from_numpy(logits.copy())).numpy()


def clear_rows(case: dict[str, Any], history: np.ndarray, logits: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Rows whose survivors stay the same in float64 with thresholds moved by 1e-5 and (ties apart) logits by 2e-6."""
    clear = np.ones(len(kept), dtype=bool)
    noise = np.random.default_rng(case["seed"])
    for nudge in (-1e-5, 0.0, 1e-5):
        stages = {name: value * (1 + nudge) if name in NUDGED else value for name, value in case["stages"].items()}
        wide = logits.astype(np.float64)
        if not case["ties"]:
            wide *= 1 + 2e-6 * noise.uniform(-1, 1, wide.shape)
        clear &= (np.isfinite(apply(stages, history, wide)) == kept).all(axis=-1)
    return clear


def processors_fixture(path: Path) -> None:
    source = rows_module()
    cases = make_cases()
    arrays: dict[str, np.ndarray] = {}
    num_clear = 0
    for i, case in enumerate(cases):
        logits, history = source.logits(case), source.history(case)
        output = apply(case["stages"], history, logits)
        kept = np.isfinite(output)
        clear = clear_rows(case, history, logits, kept)
        num_clear += int(clear.sum())
        arrays[f"{i}.kept"] = np.packbits(kept, axis=-1)
        arrays[f"{i}.clear"] = np.packbits(clear)
        if CHANGES_VALUES & set(case["stages"]):
            arrays[f"{i}.values"] = output[kept].astype(np.float32)
        elif not np.array_equal(output[kept], logits[kept]):
            raise AssertionError(f"{case['stages']} changed a surviving value")
    arrays["cases"] = np.array(json.dumps(cases))
    arrays["digest"] = np.array(source.digest(cases))
    np.savez_compressed(path, **arrays)
    total = sum(case["rows"] for case in cases)
    print(f"{path}: {path.stat().st_size:,} bytes, {len(cases)} cases, {total:,} rows, {num_clear:,} clear")

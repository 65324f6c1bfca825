"""Sampling's launches, and a row's parameters and results as the host sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from unspool.ops.cuda.launch import Launch, has_dependent_launch, next_power
from unspool.ops.cuda.sampling import (
    CHUNK,
    RESULT,
    STATE,
    digit_kernel,
    draw_kernel,
    prepare_kernel,
    tell_kernel,
    ties_kernel,
)
from unspool.ops.cuda.steps import RESULTS, ROW_PARAMS
from unspool.sampling.filters import min_p_floor
from unspool.sampling.pipeline import stages_on

if TYPE_CHECKING:
    from unspool.engine.ahead import Draw
    from unspool.params import ResolvedParams

WORDS = 16  # int32 words of a row's parameters
REPETITION_SEES_PROMPT, FREQUENCY_SEES_PROMPT, TELLS = 1, 2, 4  # flags
# The filters that the device has, in the one order that it has them in.
STAGES = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class SampleRows:
    """How each row of logits becomes a token; one entry a row. What a row does not use has the value that is off."""

    temperature: np.ndarray  # float32; 0: greedy
    seed: np.ndarray  # uint64
    position: np.ndarray  # int64: of the token that is chosen
    top_k: np.ndarray  # int32; 0: off
    top_p: np.ndarray  # float64; 1: off
    min_p: np.ndarray  # float32: filters.min_p_floor(p); -inf: off
    repetition: np.ndarray  # float32; 1: off
    frequency: np.ndarray  # float32; 0: off
    presence: np.ndarray  # float32; 0: off
    slot: np.ndarray  # int32: the place of the request's counts of tokens; -1: no penalties
    flags: np.ndarray  # int32: REPETITION_SEES_PROMPT | FREQUENCY_SEES_PROMPT | TELLS

    @staticmethod
    def greedy(count: int) -> SampleRows:
        """Rows with everything off, to be filled in."""
        return SampleRows(
            temperature=np.zeros(count, np.float32),
            seed=np.zeros(count, np.uint64),
            position=np.zeros(count, np.int64),
            top_k=np.zeros(count, np.int32),
            top_p=np.ones(count, np.float64),
            min_p=np.full(count, -np.inf, np.float32),
            repetition=np.ones(count, np.float32),
            frequency=np.zeros(count, np.float32),
            presence=np.zeros(count, np.float32),
            slot=np.full(count, -1, np.int32),
            flags=np.zeros(count, np.int32),
        )

    def __len__(self) -> int:
        return len(self.temperature)

    @property
    def is_filtered(self) -> bool:
        return bool(((self.top_k > 0) | (self.top_p < 1) | (self.min_p > -np.inf)).any())

    @property
    def tells(self) -> bool:
        return bool((self.flags & TELLS).any())

    def words(self) -> np.ndarray:
        """[row, WORDS] as the kernels read them."""
        out = np.zeros((len(self), WORDS), np.int32)
        out[:, 0] = self.temperature.view(np.int32)
        out[:, 1] = self.top_k
        out[:, 2:4] = self.top_p.view(np.int32).reshape(-1, 2)
        out[:, 4] = self.min_p.view(np.int32)
        out[:, 5:7] = self.seed.view(np.int32).reshape(-1, 2)
        out[:, 7:9] = self.position.view(np.int32).reshape(-1, 2)
        out[:, 9] = self.repetition.view(np.int32)
        out[:, 10] = self.frequency.view(np.int32)
        out[:, 11] = self.presence.view(np.int32)
        out[:, 12] = self.slot
        out[:, 13] = self.flags
        return out


@dataclass(frozen=True)
class Sampled:
    """What came of each row. `total` and `rank` are told where the row's flags asked: sampling.logprobs.RowStats(best,
    total).logprob(logit) is the raw logprob, to the bit."""

    tokens: np.ndarray  # int32; negative where there is none: sampling.native's HAS_NAN, HAS_INFINITY, NONE_LEFT
    logit: np.ndarray  # float32: the chosen token's, raw
    best: np.ndarray  # float32: the largest raw logit
    total: np.ndarray  # int64: the sum of the raw logits' weights
    rank: np.ndarray  # int32: 1 for the best

    @staticmethod
    def of(words: np.ndarray) -> Sampled:
        total = words[:, 3].astype(np.int64) & 0xFFFFFFFF | words[:, 4].astype(np.int64) << 32
        return Sampled(
            tokens=words[:, 0].copy(),
            logit=words[:, 1].copy().view(np.float32),
            best=words[:, 2].copy().view(np.float32),
            total=total,
            rank=words[:, 5].copy(),
        )


class Rows:
    """Rows of draws, packed quickly: what does not change from step to step is packed once for each sampler."""

    def __init__(self) -> None:
        self._packed: WeakKeyDictionary[Any, tuple[bytes, bool]] = WeakKeyDictionary()

    def words(self, draws: Sequence[Draw]) -> tuple[np.ndarray, bool]:
        """[draw, WORDS], and whether any of them filters."""
        known = [self._known(draw.sampler) for draw in draws]
        words = np.frombuffer(bytearray(b"".join(row for row, _ in known)), np.int32).reshape(-1, WORDS)
        positions = np.fromiter((draw.position for draw in draws), np.int64, len(draws))
        words[:, 7:9] = positions.view(np.int32).reshape(-1, 2)
        return words, any(filtered for _, filtered in known)

    def _known(self, sampler: Any) -> tuple[bytes, bool]:
        found = self._packed.get(sampler)
        if found is None:
            row = row_of(sampler.params, sampler.seed)
            found = self._packed[sampler] = (row.words().tobytes(), row.is_filtered)
        return found


def row_of(params: ResolvedParams, seed: int) -> SampleRows:
    """One row for a request whose stages are all in STAGES."""
    row = SampleRows.greedy(1)
    row.seed[:] = seed
    if params.greedy:
        return row
    row.temperature[:] = params.temperature
    row.top_k[:] = params.top_k
    row.top_p[:] = params.top_p
    if params.min_p:
        row.min_p[:] = min_p_floor(params.min_p)
    return row


def can_draw(params: ResolvedParams) -> bool:
    """Whether the device does all that these parameters ask of a draw, in their order."""
    stages = stages_on(params, None)
    at = [STAGES.index(stage) if stage in STAGES else -1 for stage in stages]
    return params.min_tokens == 0 and -1 not in at and at == sorted(at)


class Clear:
    """A launch that zeroes a tensor."""

    label = "clear"
    bytes = flops = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def run(self) -> None:
        self.tensor.zero_()


class SamplingRoom:
    """Memory that sampling needs for up to so many rows."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.rows, self.vocab_size, self.device = rows, vocab_size, device
        self.chunks = -(-vocab_size // CHUNK)
        self.state = torch.zeros((rows, STATE + self.chunks), dtype=torch.int64, device=device)
        self.values = torch.zeros((rows, vocab_size), dtype=torch.float32, device=device)

    def launches(
        self, logits: Tensor, count: int, step: Tensor, counts: Tensor, sampled: Tensor, results: Tensor,
        *, filtered: bool, tells: bool,
    ) -> list[Launch | Clear]:  # fmt: skip
        pdl = has_dependent_launch()
        common = {"step": step, "state": self.state, "vocab_size": self.vocab_size}
        common |= {"PARAMS_AT": ROW_PARAMS, "CHUNK": CHUNK, "STATE": STATE, "PDL": pdl}
        grid = (count, self.chunks)
        out: list[Launch | Clear] = [Clear(self.state)]

        def add(kernel: Any, label: str, **args: Any) -> None:
            out.append(Launch(kernel, grid, common | args, warps=8, label=label))

        if filtered:
            add(prepare_kernel, "prepare", logits=logits, x_out=self.values, counts=counts)
        for weights in (False, True) if filtered else ():
            for shift in range(28, -1, -4):
                add(digit_kernel, "digit", x_in=self.values, SHIFT=shift, WEIGHTS=weights)
            add(ties_kernel, "ties", x_in=self.values, WEIGHTS=weights, CHUNKS=next_power(self.chunks))
        where = {"results": results, "RESULT_AT": RESULTS}
        add(
            draw_kernel,
            "draw",
            logits=logits,
            x_in=self.values,
            counts=counts,
            sampled=sampled,
            FILTERED=filtered,
            **where,
        )
        if tells:
            add(tell_kernel, "tell", logits=logits, **where)
        return out


def results_room(rows: int, ring: int, device: torch.device) -> Tensor:
    return torch.zeros(ring * rows * RESULT, dtype=torch.int32, device=device)

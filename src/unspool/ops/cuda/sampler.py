"""The launches of sampling, and each row's parameters and results on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unspool.ops.cuda.filtering import BLOCK, PART, coarse_kernel, gather_kernel, search_kernel
from unspool.ops.cuda.launch import Launch, next_power
from unspool.ops.cuda.sampling import (
    CHUNK,
    MOST_LOGPROBS,
    RESULT,
    STATE,
    draw_kernel,
    logprobs_kernel,
    prepare_kernel,
)
from unspool.ops.cuda.slots import Slots, needs_slot
from unspool.ops.cuda.steps import RESULTS, ROW_PARAMS
from unspool.sampling.filters import min_p_floor
from unspool.sampling.logprobs import RowStats
from unspool.sampling.pipeline import stages_on

if TYPE_CHECKING:
    from unspool.params import ResolvedParams
    from unspool.params.rules import Stage
    from unspool.sampling.pipeline import Sampler

WORDS = 16  # int32 words of a row's parameters
BIASED, WANTS_LOGPROBS = 1, 4  # flags


@dataclass(frozen=True)
class SampleRows:
    """How each row of logits becomes a token; one entry per row. An unused parameter has the value that turns it
    off."""

    temperature: np.ndarray  # float32; 0: greedy
    seed: np.ndarray  # uint64
    position: np.ndarray  # int64: of the token that is chosen
    top_k: np.ndarray  # int32; 0: off
    top_p: np.ndarray  # float64; 1: off
    min_p: np.ndarray  # float32: filters.min_p_floor(p); -inf: off
    repetition: np.ndarray  # float32; 1: off
    frequency: np.ndarray  # float32; 0: off
    presence: np.ndarray  # float32; 0: off
    slot: np.ndarray  # int32: the slot of the request's token counts and bias; -1: none
    flags: np.ndarray  # int32: BIASED | WANTS_LOGPROBS
    tops: np.ndarray  # int32: the number of best tokens to return

    @staticmethod
    def greedy(count: int) -> SampleRows:
        """Rows with every stage off, to be filled in."""
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
            tops=np.zeros(count, np.int32),
        )

    def __len__(self) -> int:
        return len(self.temperature)

    @property
    def is_filtered(self) -> bool:
        return bool(((self.top_k > 0) | (self.top_p < 1) | (self.min_p > -np.inf)).any())

    @property
    def wants_logprobs(self) -> bool:
        return bool((self.flags & WANTS_LOGPROBS).any())

    def words(self) -> np.ndarray:
        """The parameters as the kernels read them, [row, WORDS]."""
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
        out[:, 14] = self.tops
        return out


class Sampled:
    """The result of each row. `stats`, `rank` and `top` are valid for rows whose flags request them."""

    def __init__(self, words: np.ndarray) -> None:
        self._words = words  # [row, RESULT]
        self._numbers: list[list[int]] = []  # the words as Python integers, converted on first use
        self._floats: list[list[float]] = []
        # Negative if no token was chosen: sampling.native's HAS_NAN, HAS_INFINITY, NONE_LEFT.
        self.tokens: list[int] = words[:, 0].tolist()

    def logit(self, row: int) -> float:
        """The chosen token's raw logit."""
        return self._read(row)[1][1]

    def stats(self, row: int) -> RowStats:
        """Statistics of the raw logits, bit-identical to those of sampling.logprobs."""
        numbers, floats = self._read(row)
        return RowStats(floats[2], numbers[3] & 0xFFFFFFFF | numbers[4] << 32)

    def rank(self, row: int) -> int:
        """The chosen token's rank; 1 is the best."""
        return self._read(row)[0][5]

    def logprobs(self, row: int, count: int) -> tuple[float, tuple[tuple[int, float], ...], int]:
        """The chosen token's raw logprob, the best tokens with theirs, and the chosen one's rank."""
        numbers, floats = self._read(row)
        logprob, end = self.stats(row).logprob, 8 + 2 * count
        top = zip(numbers[8:end:2], map(logprob, floats[9:end:2]), strict=True)
        return logprob(floats[1]), tuple(top), numbers[5]

    def _read(self, row: int) -> tuple[list[int], list[float]]:
        if not self._numbers:
            self._numbers, self._floats = self._words.tolist(), self._words.view(np.float32).tolist()
        return self._numbers[row], self._floats[row]


class Rows:
    """Packs the rows of draws quickly: from step to step, most rows only change in their position."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.slots = Slots(vocab_size, device)
        self._samplers: dict[int, Sampler] = {}
        self._packed: dict[int, tuple[bytes, bool, bool]] = {}
        self._numbers: list[int] = []  # the samplers of the last draws
        self._words = np.zeros((0, WORDS), np.int32)
        self._mode = (False, False)
        self._seated: list[int] = []  # rows whose sampler has a slot

    def add(self, number: int, sampler: Sampler) -> None:
        self._samplers[number] = sampler

    def remove(self, number: int) -> None:
        if self._samplers.pop(number, None) is not None:
            self._packed.pop(number, None)
            self._numbers = []  # another sampler may get this number
            self.slots.release(number)

    def words(self, numbers: Sequence[int], positions: Sequence[int]) -> tuple[np.ndarray, tuple[bool, bool]]:
        """The words of the draws [draw, WORDS], valid until the next call; whether any row filters; whether any row
        returns logprobs."""
        if self._numbers != numbers:
            known = [self._known(number) for number in numbers]
            self._words = np.frombuffer(bytearray(b"".join(row for row, *_ in known)), np.int32).reshape(-1, WORDS)
            self._mode = (any(filters for _, filters, _ in known), any(wants_logprobs for *_, wants_logprobs in known))
            self._seated = [row for row, number in enumerate(numbers) if needs_slot(self._samplers[number].params)]
            self._numbers = list(numbers)
        self._words[:, 7:9] = np.array(positions, np.int64).view(np.int32).reshape(-1, 2)
        for row in self._seated:
            number = numbers[row]
            self._words[row, 12] = self.slots.place(number, self._samplers[number], positions[row])
        return self._words, self._mode

    def _known(self, number: int) -> tuple[bytes, bool, bool]:
        found = self._packed.get(number)
        if found is None:
            sampler = self._samplers[number]
            row = row_of(sampler.params, sampler.seed)
            found = self._packed[number] = (row.words().tobytes(), row.is_filtered, row.wants_logprobs)
        return found


def _fill(field: str, value: Callable[[ResolvedParams], Any]) -> Callable[[SampleRows, ResolvedParams], None]:
    """A function that writes a parameter into the field of a row that a stage reads."""

    def fill(row: SampleRows, params: ResolvedParams) -> None:
        getattr(row, field)[:] = value(params)

    return fill


def _fill_bias(row: SampleRows, params: ResolvedParams) -> None:
    row.flags[:] |= BIASED


# The stages that the device implements, in its fixed order, and how each gets its parameters. The host samples requests
# that use another stage or another order.
STAGES: Mapping[str, Callable[[SampleRows, ResolvedParams], None]] = {
    "bias": _fill_bias,
    "allowed": _fill_bias,
    "repetition": _fill("repetition", lambda params: params.repetition_penalty),
    "frequency": _fill("frequency", lambda params: params.frequency_penalty),
    "presence": _fill("presence", lambda params: params.presence_penalty),
    "temperature": _fill("temperature", lambda params: params.temperature),
    "top_k": _fill("top_k", lambda params: params.top_k),
    "top_p": _fill("top_p", lambda params: params.top_p),
    "min_p": _fill("min_p", lambda params: min_p_floor(params.min_p)),
}
PENALTIES = ("repetition", "frequency", "presence")


def row_of(params: ResolvedParams, seed: int) -> SampleRows:
    """A row for a request whose stages are all in STAGES; the caller fills in its slot and position."""
    row = SampleRows.greedy(1)
    row.seed[:] = seed
    row.temperature[:] = params.temperature  # temperature 1 has no stage, 0 is greedy
    if params.logprobs is not None or params.best_of > params.n:
        row.flags[:] |= WANTS_LOGPROBS
        row.tops[:] = params.logprobs or 0
    for stage in stages_on(params, None):
        assert isinstance(stage, str)
        STAGES[stage](row, params)
    return row


def can_draw(params: ResolvedParams) -> bool:
    """Whether the device implements everything that these parameters request, in their order."""
    stages = stages_on(params, None)
    order: tuple[Stage, ...] = tuple(STAGES)
    at = [order.index(stage) if stage in STAGES else -1 for stage in stages]
    if -1 in at or at != sorted(at):
        return False
    if params.penalty_window >= 0 and any(stage in PENALTIES for stage in stages):
        return False  # a token that leaves the window would have to be subtracted again
    return params.logprobs is None or (params.logprobs <= MOST_LOGPROBS and params.logprobs_stage == "raw")


class SamplingRoom:
    """Buffers that sampling needs, for a maximum number of rows."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.rows, self.vocab_size, self.device = rows, vocab_size, device
        self.chunks = -(-vocab_size // CHUNK)
        self.state = torch.zeros((rows, STATE), dtype=torch.int64, device=device)
        self._values: Tensor | None = None
        self._gathered: Tensor | None = None
        self._tops: Tensor | None = None

    def launches(
        self, logits: Tensor, count: int, step: Tensor, planes: Tensor, sampled: Tensor, results: Tensor,
        *, filtered: bool, wants_logprobs: bool,
    ) -> list[Launch]:  # fmt: skip
        common = {"step": step, "state": self.state, "vocab_size": self.vocab_size}
        common |= {"PARAMS_AT": ROW_PARAMS, "STATE": STATE}
        chunked, whole = (count, self.chunks), (count,)
        out: list[Launch] = []

        def add(kernel: Any, label: str, grid: tuple[int, ...], *, warps: int = 8, **args: Any) -> None:
            out.append(Launch(kernel, grid, common | args, warps=warps, label=label))

        values: dict[str, Any] = {"x_in": None}
        if filtered:
            self._make_filter_room()
            gathered: dict[str, Any] = {"gathered": self._gathered}
            values = {"x_in": self._values}
            first: dict[str, Any] = {"logits": logits, "x_out": self._values, "planes": planes, "CHUNK": CHUNK}
            add(prepare_kernel, "prepare", chunked, **first, LOGPROBS=wants_logprobs)
            add(coarse_kernel, "coarse", chunked, **values, CHUNK=CHUNK, PART=PART)
            add(gather_kernel, "gather", chunked, **values, **gathered, CHUNK=CHUNK)
            add(search_kernel, "search", whole, **values, **gathered, BLOCK=BLOCK, warps=16)
        result_args: dict[str, Any] = {
            "logits": logits,
            "results": results,
            "RESULT_AT": RESULTS,
            "RESULT": RESULT,
            "CHUNK": CHUNK,
        }
        modes = {"FILTERED": filtered, "LOGPROBS": wants_logprobs}
        add(draw_kernel, "draw", chunked, **values, planes=planes, sampled=sampled, **modes, **result_args)
        if wants_logprobs:
            if self._tops is None:
                self._tops = torch.zeros(self.rows * self.chunks * MOST_LOGPROBS, dtype=torch.int64, device=self.device)
            best: dict[str, Any] = {"tops": self._tops, "CHUNKS": next_power(self.chunks), "MOST": MOST_LOGPROBS}
            add(logprobs_kernel, "logprobs", chunked, **best, **result_args)
        return out

    def _make_filter_room(self) -> None:
        if self._values is None:
            shape = (self.rows, self.vocab_size)
            self._values = torch.zeros(shape, dtype=torch.float32, device=self.device)
            self._gathered = torch.zeros(shape, dtype=torch.int32, device=self.device)


def results_room(rows: int, ring: int, device: torch.device) -> Tensor:
    return torch.zeros(ring * rows * RESULT, dtype=torch.int32, device=device)

"""Per-request sampling state on the device: how often penalties have counted each token, and the bias.

    planes[slot]   counts for repetition · counts for frequency and presence · bias (float32, minus infinity: forbidden)

A request has a slot from its first draw until its sampler is removed. Every draw counts its own token, before the host
knows it. If other tokens were chosen (the slot is new, or the host has chosen meanwhile), the position differs, and the
counts are set again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from unspool.ops.cuda.launch import next_power
from unspool.ops.cuda.sampling import PLANES
from unspool.sampling.pipeline import stages_on

if TYPE_CHECKING:
    from unspool.params import ResolvedParams
    from unspool.sampling.pipeline import Sampler
    from unspool.sampling.state import Counts

NEVER = -np.inf
FEWEST = 16


@dataclass
class Slot:
    index: int
    position: int  # of the draw that its counts are valid for
    has_bias: bool
    is_early: bool = False  # end tokens are still forbidden


class Slots:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.planes = torch.zeros((1, PLANES, 1), dtype=torch.int32, device=device)
        self._slots: dict[int, Slot] = {}  # by sampler number
        self._free: list[int] = []

    def place(self, number: int, sampler: Sampler, position: int) -> int:
        """The slot of a sampler, prepared for a draw at this position."""
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = self._take(sampler)
        if slot.position != position:
            self._set_counts(slot, sampler, position)
        slot.position = position + 1
        if slot.has_bias and slot.is_early != self._is_early(sampler, position):
            slot.is_early = not slot.is_early
            self._set_bias(slot, sampler, sampler.end_ids)
        return slot.index

    def release(self, number: int) -> None:
        """Free the slot of a sampler that draws no more. Kernels already queued run before those of the slot's next
        owner."""
        slot = self._slots.pop(number, None)
        if slot is not None:
            self._free.append(slot.index)

    def _take(self, sampler: Sampler) -> Slot:
        if not self._free:
            self._grow()
        on = stages_on(sampler.params, None)
        slot = Slot(self._free.pop(), -1, "bias" in on or "allowed" in on)
        if slot.has_bias:
            params = sampler.params
            listed = sorted(set(params.logit_bias) | set(params.allowed_token_ids or ()))
            self._bias_of(slot).fill_(0.0 if params.allowed_token_ids is None else NEVER)
            self._set_bias(slot, sampler, np.array(listed, np.int64))
        return slot

    def _grow(self) -> None:
        """Double the number of slots. Holders of `planes` must notice that the tensor was replaced."""
        old = self.planes if self.planes.shape[2] == self.vocab_size else self.planes[:0]
        size = max(FEWEST, next_power(len(old) + 1))
        self.planes = torch.zeros((size, PLANES, self.vocab_size), dtype=torch.int32, device=self.device)
        self.planes[: len(old)] = old if len(old) else 0
        self._free += range(size - 1, len(old) - 1, -1)

    # The content of a slot -------------------------------------------------------------------------------------------
    def _set_counts(self, slot: Slot, sampler: Sampler, position: int) -> None:
        history = sampler.history
        for plane, counts in enumerate((history.repeated, history.frequent)):
            if counts is not None:
                assert history.tokens.size == position, "a draw's counts are those of the tokens before it"
                self._fill(self.planes[slot.index, plane], counts)

    def _fill(self, row: torch.Tensor, counts: Counts) -> None:
        row.zero_()
        row[self._ids(counts.ids)] = torch.from_numpy(counts.counts.copy()).to(self.device)

    def _set_bias(self, slot: Slot, sampler: Sampler, ids: np.ndarray) -> None:
        params = sampler.params
        never = set(sampler.end_ids.tolist()) if slot.is_early else set()
        if params.allowed_token_ids is not None:
            never |= set(ids.tolist()) - set(params.allowed_token_ids)
        values = [NEVER if token in never else params.logit_bias.get(token, 0) for token in ids.tolist()]
        self._bias_of(slot)[self._ids(ids)] = torch.tensor(values, dtype=torch.float32).to(self.device)

    def _bias_of(self, slot: Slot) -> torch.Tensor:
        return self.planes[slot.index, 2].view(torch.float32)

    def _ids(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)

    @staticmethod
    def _is_early(sampler: Sampler, position: int) -> bool:
        early: bool = position - sampler.history.num_prompt < sampler.params.min_tokens
        return early and sampler.end_ids.size > 0


def needs_slot(params: ResolvedParams) -> bool:
    on = stages_on(params, None)
    return any(stage in on for stage in ("bias", "allowed", "repetition", "frequency", "presence"))

"""What a compiled model is to whoever runs it: batches in; logits, or tokens that the device chose, out.

Everything here is plain values, so that a step can be described in one process and run in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol, overload

from unspool.lazy import np

if TYPE_CHECKING:
    from array import array

    from unspool.params import ResolvedParams
    from unspool.sampling.pipeline import Sampler

    Integers = array[int] | memoryview[int] | np.ndarray
    Floats = array[float] | memoryview[float] | np.ndarray
    Row = memoryview[float] | np.ndarray


NO_INTEGERS = memoryview(b"").cast("i")  # as a default: an array is mutable
NO_FLOATS = memoryview(b"").cast("f")


@dataclass(frozen=True)
class Batch:
    """What one step computes: rows of tokens, packed sequence after sequence.

    Row r holds the token `ids[r]` at `positions[r]`; its key and value go to slot `slots[r]` (block · block_size +
    offset). Sequence s owns rows `starts[s] : starts[s + 1]` and the blocks `tables[s]`; a row sees every key of its
    sequence at its own position or before. Logits are computed for `logit_rows` alone.

    Recurrent layers keep the states of sequence s in the slot `states[s]`. They are zeros before position 0. After row
    r they are also written to the slot `saves[r]`, unless that is negative.

    A model that reads rows beside its tokens (Ops.given) finds them in `given`, row after row.

    The numbers lie in any buffers of these types: Python's own arrays cost less than numpy's where they are few.
    """

    ids: Integers  # int32 [rows]
    positions: Integers  # int32 [rows]
    slots: Integers  # int64 [rows]
    starts: Integers  # int32 [sequences + 1]
    tables: Integers  # int32 [sequences, most blocks of any]; unused places hold 0
    logit_rows: Integers  # int32 [logits]
    states: Integers = NO_INTEGERS  # int32 [sequences]; empty for models without states
    saves: Integers = NO_INTEGERS  # int32 [rows]; empty: nothing is saved
    given: Floats = NO_FLOATS  # float32 [rows · width]; empty for models that read tokens alone

    def arrays(self) -> ArrayBatch:
        """The same numbers as numpy arrays, not copied."""
        return ArrayBatch(*(np.asarray(getattr(self, each.name)) for each in fields(Batch)))


@dataclass(frozen=True)
class ArrayBatch(Batch):
    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    tables: np.ndarray
    logit_rows: np.ndarray
    states: np.ndarray
    saves: np.ndarray
    given: np.ndarray

    def arrays(self) -> ArrayBatch:
        return self


class HostRows(Protocol):
    """Rows of float32 in the host's memory: a numpy array, or what can become one."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Row]: ...
    @overload
    def __getitem__(self, index: int, /) -> Row: ...
    @overload
    def __getitem__(self, index: slice, /) -> HostRows: ...


@dataclass(frozen=True, slots=True)
class Draws:
    """Tokens to be chosen on the device, one from each row of logits: whose sampler chooses, and for which position.

    A row r of the batch with `sources[r]` of 0 or more takes its token from that draw of the launch before.
    """

    samplers: Sequence[int]  # numbers that samplers were added under
    positions: Sequence[int]
    sources: Integers  # int32 [rows]

    def __len__(self) -> int:
        return len(self.positions)


class Launched(Protocol):
    """A step that is under way on a device."""

    def tokens(self) -> Sequence[int]:
        """What was chosen, in the order of the draws; waits for the device. Negative where nothing could be."""

    def logprobs(self, draw: int, count: int) -> tuple[float, tuple[tuple[int, float], ...], int]:
        """The chosen token's logprob, the `count` best tokens with theirs, and the chosen one's rank, where the draw's
        parameters ask."""


class DeviceSampling(Protocol):
    """Choosing tokens where the logits are, so that the host can launch a step before it has read the one before."""

    def can_draw(self, params: ResolvedParams) -> bool:
        """Whether the device has every stage that these parameters turn on."""

    def add_sampler(self, number: int, sampler: Sampler) -> None:
        """Let draws name this sampler. A number that was there already gets another sampler of equal parameters."""

    def remove_sampler(self, number: int) -> None:
        """Its draws have ended; harmless where there is none."""

    def launch(self, batch: Batch, draws: Draws) -> Launched:
        """Queue a step and its draws. At least two launches may be unread at a time."""


class Step(Protocol):
    """A compiled model over one KV cache. Not thread-safe."""

    @property
    def sampling(self) -> DeviceSampling | None:
        """How the device chooses tokens; None: it does not, and the host chooses from `run`'s rows."""

    def run(self, batch: Batch) -> HostRows:
        """Compute a step, and wait for it: float32 rows of logits [len(logit_rows), vocabulary].

        They may lie in a buffer that the next step overwrites.
        """

    def kept(self) -> HostRows:
        """The rows that the last run kept beside its result (Ops.keep), one for each row of the batch; they lie in a
        buffer that the next run overwrites. None are kept by most models."""

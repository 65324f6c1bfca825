"""The interface of a compiled model: it takes batches, and returns logits or tokens that the device chose.

All types here hold values only, so that a step can be described in one process and run in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Protocol, overload

from unspool.lazy import np
from unspool.records import record

if TYPE_CHECKING:
    from array import array

    from unspool.params import ResolvedParams
    from unspool.sampling.pipeline import Sampler

    Integers = array[int] | memoryview[int] | np.ndarray
    Floats = array[float] | memoryview[float] | np.ndarray
    Row = memoryview[float] | np.ndarray


NO_INTEGERS = memoryview(b"").cast("i")  # a default value that cannot be modified, unlike an array
NO_FLOATS = memoryview(b"").cast("f")


@record(frozen=True, eq=False)
class Batch:
    """What one step computes: rows of tokens, packed sequence by sequence.

    Row r holds the token `ids[r]` at `positions[r]`; its key and value go to slot `slots[r]` (block · block_size +
    offset). Sequence s owns rows `starts[s] : starts[s + 1]` and the blocks `tables[s]`; a row sees every key of its
    sequence at its own position or before. Logits are computed for `logit_rows` alone.

    If the cache has several groups of layers, `slots` and `tables` have the rows and sequences of the first group, then
    those of the second, and so on. Blocks that no row sees any more, because of a window, are -1.

    Recurrent layers keep the state of sequence s in the slot `states[s]`. It is zeros before position 0. After row r
    the state is also written to the slot `saves[r]`, unless that is negative.

    A model that reads rows in addition to its tokens (Ops.given) finds them in `given`, row after row.

    The numbers may lie in any buffers of these types: Python's own arrays are cheaper than numpy's for few numbers.
    """

    ids: Integers  # int32 [rows]
    positions: Integers  # int32 [rows]
    slots: Integers  # int64 [groups · rows]
    starts: Integers  # int32 [sequences + 1]
    tables: Integers  # int32 [groups · sequences, largest number of blocks]; unused places hold 0
    logit_rows: Integers  # int32 [logits]
    states: Integers = NO_INTEGERS  # int32 [sequences]; empty for models without states
    saves: Integers = NO_INTEGERS  # int32 [rows]; empty: nothing is saved
    given: Floats = NO_FLOATS  # float32 [rows · width]; empty for models that read only tokens

    def arrays(self) -> ArrayBatch:
        """The same numbers as numpy arrays, without a copy."""
        return ArrayBatch(*(np.asarray(getattr(self, each.name)) for each in fields(Batch)))


@record(frozen=True, eq=False)
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
    """Rows of float32 in the host's memory: a numpy array, or an object that `np.asarray` converts."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Row]: ...
    @overload
    def __getitem__(self, index: int, /) -> Row: ...
    @overload
    def __getitem__(self, index: slice, /) -> HostRows: ...


@record(frozen=True, slots=True)
class Draws:
    """Tokens to choose on the device, one per row of logits: which sampler chooses each, and for which position.

    A row r of the batch with `sources[r]` of 0 or more takes its token from that draw of the previous launch.
    """

    samplers: Sequence[int]  # the numbers that the samplers were added under
    positions: Sequence[int]
    sources: Integers  # int32 [rows]

    def __len__(self) -> int:
        return len(self.positions)


class Launched(Protocol):
    """A step that was launched on a device."""

    def tokens(self) -> Sequence[int]:
        """The chosen tokens, in the order of the draws; waits for the device. Negative if no token could be chosen."""

    def logprobs(self, draw: int, count: int) -> tuple[float, tuple[tuple[int, float], ...], int]:
        """The chosen token's logprob, the `count` best tokens with theirs, and the rank of the chosen one, if the
        draw's parameters request them."""


class DeviceSampling(Protocol):
    """Chooses tokens on the device, so that the host can launch a step before it has read the previous one."""

    def can_draw(self, params: ResolvedParams) -> bool:
        """Whether the device implements every stage that these parameters turn on."""

    def add_sampler(self, number: int, sampler: Sampler) -> None:
        """Make a sampler available to draws. A number in use is reassigned to a sampler with equal parameters."""

    def remove_sampler(self, number: int) -> None:
        """Remove a sampler whose draws have ended; does nothing for an unknown number."""

    def launch(self, batch: Batch, draws: Draws) -> Launched:
        """Queue a step and its draws. At least two launches may be unread at a time."""


class Step(Protocol):
    """A compiled model over one KV cache. Not thread-safe."""

    @property
    def sampling(self) -> DeviceSampling | None:
        """How the device chooses tokens; None if the host chooses them from `run`'s rows."""

    def run(self, batch: Batch) -> HostRows:
        """Compute a step, and wait for it: float32 rows of logits [len(logit_rows), vocabulary].

        They may lie in a buffer that the next step overwrites.
        """

    def kept(self) -> HostRows:
        """The rows that the last run kept in addition to its result (Ops.keep), one per row of the batch. They lie in a
        buffer that the next run overwrites. Most models keep none."""

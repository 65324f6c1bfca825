"""The operations that models are written in: one signature per operation, several backends.

    reference   numpy, slow, exact: the specification
    cpu         native kernels; a model is recorded once and each step is one native call
    cuda        Triton kernels; each step is a CUDA graph

A model calls these methods on opaque `Rows` (activations, one row per token) and never looks inside: on the CPU, `Rows`
are a buffer of a program that is being recorded; on the GPU, a tensor; in the reference, a float32 array.

The first promise binds every backend: *a row's bits depend on that row and on the weight's shape, never on how many
rows come along or where it stands.*
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from unspool.config import Activation, EngineConfig, RopeStyle
from unspool.errors import BackendError
from unspool.ops.recurrence import ConvSpec, RecurrenceSpec
from unspool.ops.routing import Routing
from unspool.ops.step import ArrayBatch, Batch, DeviceSampling, Draws, HostRows, Launched, Step
from unspool.ops.storage import LayerGroup, Storage, Widths
from unspool.records import record

if TYPE_CHECKING:
    from unspool.weights.weight import Weight

__all__ = [
    "ArrayBatch", "AttentionSpec", "Batch", "ConvSpec", "DeviceSampling", "Draws", "ExpertWeights", "Experts",
    "HostRows", "KVCache", "Launched", "Matrix", "Ops", "Part", "RecurrenceSpec", "Rope", "Routing", "Rows", "Step",
    "Vector", "load", "uses_cuda",
]  # fmt: skip

# How the names in /dev begin that NVIDIA's drivers make: for cards, boards with a GPU of their own, Windows' Linux.
GPU_DEVICES = ("nvidia", "nvhost", "nvgpu", "nvmap", "dxg")

Rows = Any  # the backend's type for activations
Matrix = Any  # the backend's type for a prepared weight, from Ops.matrix
Vector = Any  # the backend's type for a prepared float32 vector, from Ops.vector
Experts = Any  # the backend's type for prepared experts, from Ops.experts


@record(frozen=True)
class Rope:
    """Rotary positions: channel pair i of each head is rotated by position · inv_freq[i]; cos and sin are multiplied by
    `scale`."""

    inv_freq: array[float]  # float32 [rope_dim / 2]
    style: RopeStyle  # pairs are (2i, 2i+1) when interleaved, (i, i + rope_dim/2) when half
    scale: float = 1.0


@record(frozen=True)
class Part:
    """Columns of a row: copied, multiplied by their weights ("scaled"), or normed and then multiplied by their weights.

    A norm divides by the root mean square, or by the standard deviation after it subtracts the mean.
    """

    start: int
    width: int
    norm: Literal["copy", "rms", "centered", "scaled"] = "copy"


@record(frozen=True)
class AttentionSpec:
    """One layer's attention: heads, rotation, optional per-head norms, and which keys a query sees."""

    layer: int  # the layer whose keys and values are read
    num_heads: int
    num_kv_heads: int
    head_dim: int  # channels of a query and a key
    scale: float
    rope: Rope | None  # None: no rotation
    window: int | None = None  # keys a query sees, itself included; None: all
    softcap: float | None = None
    q_norm: Vector | None = None  # RMS norm weight of head_dim, before the rotation
    k_norm: Vector | None = None
    norm_eps: float = 1e-6
    value_dim: int = 0  # channels of a value; 0: head_dim
    stores: bool = True  # rows have keys and values after the queries; else another layer has stored them
    sinks: Vector | None = None  # one score per head that takes part in the softmax and has no value
    growth: float = 0.0  # queries are multiplied by 1 + growth · log(1 + ⌊position / period⌋)
    period: int = 1
    latent: bool = False  # values are the last value_dim channels of keys, not stored separately

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    @property
    def row_width(self) -> int:
        """Values in a row: queries, and keys and values if the layer stores them."""
        values = 0 if self.latent else self.value_dim
        kept = self.num_kv_heads * (self.head_dim + values) if self.stores else 0
        return self.num_heads * self.head_dim + kept


@record(frozen=True)
class ExpertWeights:
    """The experts of a layer."""

    gate_up: Experts  # for each expert, the gate stacked on the up projection; without gates, the up projection alone
    down: Experts
    activation: Activation = "silu"
    gate_up_bias: Vector | None = None  # of all experts, concatenated
    down_bias: Vector | None = None
    gated: bool = True


class KVCache(Protocol):
    """What layers keep (storage.py), in a layout that the backend chooses.

    Keys and values lie in blocks of `block_size` tokens. Each group of layers has its own blocks. States lie in
    `num_states` slots: each running sequence has one, and other slots may hold copies of earlier states.
    """

    block_size: int
    groups: tuple[LayerGroup, ...]
    num_blocks: tuple[int, ...]  # of each group
    block_bytes: tuple[int, ...]  # of one block of each group, summed over its layers
    num_states: int
    state_bytes: int  # of one slot, summed over all layers; 0: no layer has a state
    layout: str  # names the meaning of the bytes; a saved block can be restored only into an equal layout

    def copy_block(self, source: int, target: int, group: int = 0) -> None:
        """Copy a whole block in all layers of a group, for copy-on-write."""

    def read_block(self, block: int, group: int = 0) -> bytes: ...
    def write_block(self, block: int, data: bytes, group: int = 0) -> None: ...

    def clear_state(self, slot: int) -> None:
        """Make a slot the state of a sequence that has no tokens yet."""

    def copy_state(self, source: int, target: int) -> None:
        """Copy a slot in all layers: for a fork, into a snapshot, or back."""

    def read_state(self, slot: int) -> bytes: ...
    def write_state(self, slot: int, data: bytes) -> None: ...


class Ops(Protocol):
    """A backend. The signatures are the contract; ops/reference.py defines their meaning."""

    name: str
    kernel_set: str  # what a receipt records: backend and instruction set, e.g. "cpu-avx2"

    # Preparing a model -------------------------------------------------------------------------------------------
    def matrix(self, parts: Sequence[Weight]) -> Matrix:
        """Prepare weights that share their input, stacked by output features (q, k and v; gate and up)."""

    def vector(self, parts: Sequence[Weight]) -> Vector:
        """Prepare float32 vectors, concatenated: norm weights and biases."""

    def experts(self, parts: Sequence[Sequence[Weight]]) -> Experts:
        """Prepare one matrix per expert. Each is stacked from its own parts as in `matrix`; all have one shape."""

    def kv_cache(
        self, layers: Sequence[Storage], engine: EngineConfig, num_blocks: int | Sequence[int], num_states: int = 0
    ) -> KVCache:
        """Allocate the cache for what these layers keep: with a number of blocks for each group of layers, or with one
        number, for all layers together."""

    @property
    def loads_late(self) -> bool:
        """Whether reading a weight only registers it, so that `finish_loading` prepares it."""

    def finish_loading(self, progress: Callable[[float], None] | None = None) -> None:
        """Prepare the remaining weights, as the first step would; `progress` is called with the share that is done."""

    def kv_room(self, widths: Widths, engine: EngineConfig) -> int | None:
        """Bytes that a device with its own memory has left for keys and values, after the weights are loaded. None:
        keys and values lie in the host's memory."""

    def compile(self, forward: Callable[[Batch, KVCache], Rows], kv: KVCache) -> Step:
        """Compile a model's step over one cache."""

    # Computing -----------------------------------------------------------------------------------------------------
    def embed(self, batch: Batch, weight: Matrix, scale: float = 1.0, positions: Matrix | None = None) -> Rows:
        """Rows of `weight` looked up by token, times `scale`, plus rows of `positions` looked up by position. A token
        beyond the table gets its first row."""

    def given(self, batch: Batch, width: int) -> Rows:
        """Rows that the batch carries in addition to its tokens."""

    def norm(self, x: Rows, weight: Vector, eps: float, residual: Rows | None = None) -> Rows:
        """residual + x / rms(x) · weight"""

    def layer_norm(
        self, x: Rows, weight: Vector, bias: Vector | None, eps: float, residual: Rows | None = None
    ) -> Rows:
        """residual + (x - mean) / deviation · weight + bias"""

    def linear(
        self,
        x: Rows,
        weight: Matrix,
        bias: Vector | None = None,
        residual: Rows | None = None,
        activation: Activation | None = None,
        scale: float = 1.0,
    ) -> Rows:
        """residual + scale · activation(x · weightᵀ + bias)"""

    def gated(self, x: Rows, weight: Matrix, activation: Activation, bias: Vector | None = None) -> Rows:
        """activation(x · gateᵀ) · (x · upᵀ), where weight stacks gate over up, and bias their biases"""

    def multiply(self, x: Rows, gate: Rows, activation: Activation | None = None) -> Rows:
        """x · activation(gate), element by element"""

    def arrange(self, x: Rows, parts: Sequence[Part], weight: Vector | None = None, eps: float = 0.0) -> Rows:
        """Rows assembled from parts of x; `weight` has the weights of all parts except copied ones, in order."""

    def join(self, x: Rows, y: Rows) -> Rows:
        """Each row of x, followed by the same row of y."""

    def add(self, x: Rows, y: Rows, x_scale: float = 1.0, y_scale: float = 1.0, start: int = 0) -> Rows:
        """x_scale · x, plus y_scale · y repeated from column `start` to the end of the row"""

    def cut(self, x: Rows, deviations: float) -> Rows:
        """max(0, x - mean(x) - deviations · deviation(x)), with the mean and the standard deviation of the row"""

    def level(self, x: Rows, like: Rows, least: float) -> Rows:
        """Each row of `like`, followed by the parts of x, which have the same width: each part times
        rms(like) / rms(part), where the part's mean square is at least `least`."""

    def mix(self, x: Rows, logits: Rows, table: Vector, bias: float, residual: Rows) -> Rows:
        """Rows whose parts have one width: residual_i + Σ_j (bias + Σ_k table[i, j, k] · tanh(logit_k)) · x_j"""

    def linear_heads(self, x: Rows, weight: Experts) -> Rows:
        """Multiply each head's part of a row by that head's own matrix: x_h · weight_hᵀ"""

    def moe(self, x: Rows, scores: Rows, routing: Routing, experts: ExpertWeights, residual: Rows | None) -> Rows:
        """residual + Σ weight_e · down_e(activation(gate_e · x) · (up_e · x)) over the experts e of each row. Experts
        without gates compute residual + Σ weight_e · down_e(activation(up_e · x)).

        `scores` are the router's logits. The terms are added in order of their scores, the best first.
        """

    def scale_rows(self, x: Rows, logit: Rows, residual: Rows | None) -> Rows:
        """residual + sigmoid(logit) · x, with one logit per row"""

    def attention(self, qkv: Rows, spec: AttentionSpec, batch: Batch, kv: KVCache) -> Rows:
        """Norm and rotate q and k, store k and v in their slots, attend; returns rows of num_heads · value_dim."""

    def short_conv(self, x: Rows, spec: ConvSpec, batch: Batch, kv: KVCache) -> Rows:
        """A causal convolution over a sequence's last tokens; returns rows of spec.channels."""

    def recurrence(self, x: Rows, gates: Rows, spec: RecurrenceSpec, batch: Batch, kv: KVCache) -> Rows:
        """A delta rule or a scan over a sequence; returns rows of num_heads · value_dim."""

    def take(self, x: Rows, batch: Batch) -> Rows:
        """The rows whose logits are needed (Batch.logit_rows)."""

    def logits(
        self,
        x: Rows,
        weight: Matrix,
        softcap: float | None = None,
        bias: Vector | None = None,
        scale: float = 1.0,
    ) -> Rows:
        """softcap · tanh(scale · (x · weightᵀ + bias) / softcap) in float32"""

    def keep(self, x: Rows, rows: Rows) -> Rows:
        """x, as the result of a step. `rows`, one per token, can be read in addition to it (Step.kept)."""


def load(config: EngineConfig) -> Ops:
    """The backend for a device, imported only now. If it is missing, the error says why and how to install it."""
    if config.device == "reference":
        from unspool.ops.reference import ReferenceOps

        return ReferenceOps()
    if uses_cuda(config):
        from unspool.ops.cuda import CudaOps

        return CudaOps()
    try:
        from unspool.ops.cpu import CpuOps
    except ImportError as error:
        raise BackendError(
            f"the native CPU kernels are not built ({error}); run `pip install .` in the source tree, "
            'or pass device="reference" for the slow numpy backend'
        ) from error
    return CpuOps(threads=config.threads, isa=config.isa)


def uses_cuda(config: EngineConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and _cuda_is_usable())


def _may_have_gpu() -> bool:
    """Whether it makes sense to ask NVIDIA's driver, which takes longer than to look for its devices."""
    if sys.platform != "linux":
        return True
    try:
        return any(name.startswith(GPU_DEVICES) for name in os.listdir("/dev"))
    except OSError:
        return True


def _cuda_is_usable() -> bool:
    """Whether a GPU can be used. Asks for the device and its driver first, because importing torch is slow."""
    if not _may_have_gpu():
        return False
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")  # find_library would start up to three processes to find it
    except OSError:
        return False
    try:
        import torch
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available()

"""What a model needs and how fast it can be on a machine, from the sizes of its tensors alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unspool.cache.blocks import blocks_in_window
from unspool.config import ModelConfig
from unspool.engine.sizing import KvSizes, num_states
from unspool.errors import BackendError, RequestError
from unspool.models.costs import StepCosts, step_costs
from unspool.models.registry import architecture_of
from unspool.ops.storage import integer_key_bytes, kv_bytes_per_token, state_bytes

if TYPE_CHECKING:
    from unspool.config import EngineConfig
    from unspool.models.layers import Architecture
    from unspool.weights.weight import Weight

EXAMPLE_TOKENS = 1024  # of a modest request
MOST_AT_ONCE = 1 << 20  # larger batch sizes are not reported


@dataclass(frozen=True)
class Target:
    """The machine of a plan, this one or another. Sizes in bytes, speeds per second; None: unknown."""

    name: str
    kind: Literal["cpu", "cuda"]
    total: int
    free: int
    bandwidth: float | None = None
    bandwidth_how: str = ""
    compute: float | None = None
    compute_how: str = ""


@dataclass(frozen=True)
class KvLayers:
    """Layers that store keys and values of the same sizes."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    def describe(self, kv_dtype: str) -> str:
        factors = f"{self.num_layers} layers · {self.num_kv_heads} KV heads"
        if kv_dtype == "q8":
            key = integer_key_bytes(self.key_dim)
            return f"{factors} · (a key of {key}, a value of {self.value_dim}, 4 for the scale of each)"
        size = 4 if kv_dtype == "f32" else 2
        if self.value_dim == 0:  # latent layers, for which a GPU stores only whole keys
            return f"{factors} · {self.key_dim} · {size} bytes"
        if self.key_dim == self.value_dim:
            return f"2 · {factors} · {self.key_dim} · {size} bytes"
        return f"{factors} · ({self.key_dim} + {self.value_dim}) · {size} bytes"


@dataclass(frozen=True)
class Window:
    """Layers that see a window of keys: they have blocks of their own, which are released behind it."""

    num_layers: int
    window: int  # keys that a token sees
    held_tokens: int  # of a sequence, whose keys and values are kept at most while it decodes
    kv_bytes_per_token: int
    kv_tokens: int  # that there is room for
    kv_bytes: int


@dataclass(frozen=True)
class Floor:
    """A minimum time, and what limits it."""

    seconds: float
    bound: Literal["memory", "compute"]


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes, times in seconds."""

    model: str
    architecture: str
    num_layers: int
    kv_layers: list[KvLayers]
    context_length: int
    parameters: int
    weight_bytes: int
    weight_formats: dict[str, int]  # bytes in each format
    step_bytes: int  # weights that one token reads: without lookup tables, and with only the experts that it uses
    kv_dtype: str
    kv_bytes_per_token: int
    kv_tokens: int  # that layers without a window have room for; if all layers have windows, those with the largest
    kv_bytes: int  # in all layers
    windows: list[Window]
    state_bytes: int  # of the recurrent layers of one sequence; 0: there are none
    num_states: int  # sequences and snapshots that fit
    free_bytes: int
    device: str
    workspace_bytes: int  # on a device with its own memory: needs of a step in addition to weights and cache
    request_tokens: int  # tokens of a request for the times below
    requests: dict[int, int]  # tokens of a request with its answer -> how many fit at once
    problem: str | None = None  # why a GPU has no room for a cache

    @property
    def fits(self) -> bool:
        return self.problem is None and self.workspace_bytes + self.total_bytes <= self.free_bytes

    @property
    def total_bytes(self) -> int:
        """Weights and a full cache."""
        return self.weight_bytes + self.kv_bytes + self.num_states * self.state_bytes


class Planner:
    """A model on a target: its plan and its floors."""

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        weights: Mapping[str, Weight],
        engine: EngineConfig,
        target: Target,
        request_tokens: int | None = None,
    ) -> None:
        self._name, self._model, self._weights, self._target = name, model, weights, target
        self._engine = engine.with_device_defaults(target.kind)
        self._architecture = architecture_of(model)
        self._context = engine.context_of(model.context_length)
        self.request_tokens = min(request_tokens or EXAMPLE_TOKENS, self._context)
        self._keys_alone = target.kind == "cuda"
        kept = self._architecture.storage
        self._kv_bytes = kv_bytes_per_token(kept, self._engine.kv_dtype, keys_alone=self._keys_alone)
        self.sizes = KvSizes(kept, self._context, self._engine, keys_alone=self._keys_alone)
        self.costs: StepCosts = step_costs(model, weights.values(), self._kv_bytes, lambda w: self._held(w)[1])

    # Memory ---------------------------------------------------------------------------------------------------------
    def plan(self) -> Plan:
        model, engine, target = self._model, self._engine, self._target
        formats: Counter[str] = Counter()
        for weight in self._weights.values():
            name, nbytes = self._held(weight)
            formats[name] += nbytes
        (num_blocks, num_slots), workspace, problem = self._blocks(formats.total())
        return Plan(
            model=self._name,
            architecture=model.architecture,
            num_layers=model.num_layers,
            kv_layers=_kv_layers(self._architecture, keys_alone=self._keys_alone),
            context_length=self._context,
            parameters=sum(math.prod(weight.shape) for weight in self._weights.values()),
            weight_bytes=formats.total(),
            weight_formats=dict(formats.most_common()),
            step_bytes=round(self.costs.weight_bytes()),
            kv_dtype=engine.kv_dtype,
            kv_bytes_per_token=self._kv_bytes,
            kv_tokens=num_blocks[0] * engine.block_size,
            kv_bytes=self.sizes.nbytes(num_blocks),
            windows=self._windows(num_blocks),
            state_bytes=state_bytes(self._architecture.storage),
            num_states=num_slots,
            free_bytes=target.free,
            device="cpu" if target.kind == "cpu" and not target.name else target.name,
            workspace_bytes=workspace,
            request_tokens=self.request_tokens,
            requests={
                length: min([self.sizes.at_once(num_blocks, length), *([num_slots] if num_slots else [])])
                for length in sorted({self.request_tokens, self._context})
            },
            problem=problem,
        )

    def _windows(self, num_blocks: Sequence[int]) -> list[Window]:
        size, sizes = self._engine.block_size, self.sizes
        return [
            Window(
                num_layers=len(group.layers),
                window=group.window,
                held_tokens=blocks_in_window(group.window, size, 1) * size,
                kv_bytes_per_token=nbytes,
                kv_tokens=count * size,
                kv_bytes=count * size * nbytes,
            )
            for group, count, nbytes in zip(sizes.groups, num_blocks, sizes.bytes_per_token, strict=True)
            if group.window is not None
        ]

    def _blocks(self, weights: int) -> tuple[tuple[tuple[int, ...], int], int, str | None]:
        """Blocks of the cache's groups and slots for states, bytes of a step's workspace, and the reason if there is no
        room."""
        storage, target = self._architecture.storage, self._target
        none = tuple(0 for _ in self.sizes.groups)
        room, workspace = None, 0
        if target.kind == "cuda":
            from unspool.ops.cuda import memory

            workspace = memory.workspace_bytes(self._architecture.widths, self._engine)
            if self._engine.kv_tokens is None:
                try:
                    room = memory.kv_room(target.free - weights, target.total, self._architecture.widths, self._engine)
                except BackendError as error:
                    return (none, 0), workspace, str(error)
        elif target.name:  # another computer: all memory that weights leave
            room = target.free - weights
            if room <= 0 and self._engine.kv_tokens is None:
                return (none, 0), 0, f"the weights alone take {weights / 1e9:.1f} GB of {target.total / 1e9:.1f} GB"
        try:
            num_slots = num_states(storage, self._engine, room)
            if room is not None:
                room -= num_slots * state_bytes(storage)
            return (self.sizes.blocks(room), num_slots), workspace, None
        except RequestError as error:
            if room is None:  # the user's setting, which an engine would refuse too
                raise
            return (none, 0), workspace, str(error)

    def _held(self, weight: Weight) -> tuple[str, int]:
        """The format of a weight during computation, and its bytes."""
        from unspool.weights.fp8_scales import EIGHT_BIT_FLOATS

        if self._target.kind == "cuda":
            from unspool.ops.cuda.memory import weight_bytes

            return weight.format, weight_bytes([weight])
        if weight.format in EIGHT_BIT_FLOATS:  # see docs/loading.md
            return f"{weight.format} as bf16", 2 * math.prod(weight.shape)
        return weight.format, weight.nbytes

    # Time -----------------------------------------------------------------------------------------------------------
    def decode_floor(self, context: int = 0, batch: int = 1) -> Floor | None:
        """The floor of one step of `batch` sequences, each with `context` tokens before it."""
        nbytes = self.costs.weight_bytes(batch) + batch * self.costs.cache_bytes(context)
        return self._floor(nbytes, batch * self.costs.decode_flops(context))

    def prefill_floor(self, tokens: int) -> Floor | None:
        """The floor of a prompt of `tokens` tokens, until the first token; None if the compute is unknown."""
        if self._target.compute is None:
            return None
        return self._floor(self.costs.weight_bytes(tokens), self.costs.prefill_flops(tokens))

    def _floor(self, nbytes: float, flops: float) -> Floor | None:
        if self._target.bandwidth is None:
            return None
        reading = nbytes / self._target.bandwidth
        computing = flops / self._target.compute if self._target.compute is not None else 0.0
        return Floor(max(reading, computing), "compute" if computing > reading else "memory")

    def compute_bound_batch(self, context: int) -> int | None:
        """The smallest batch whose step takes longer to compute than to read; None: reading always takes longer, or a
        speed is unknown."""
        if self._target.compute is None or self._target.bandwidth is None:
            return None
        return compute_bound_batch(self.costs, context, self._target.bandwidth, self._target.compute)


def compute_bound_batch(costs: StepCosts, context: int, bandwidth: float, compute: float) -> int | None:
    """See `Planner.compute_bound_batch`."""

    def is_bound(batch: int) -> bool:
        nbytes = costs.weight_bytes(batch) + batch * costs.cache_bytes(context)
        return batch * costs.decode_flops(context) / compute > nbytes / bandwidth

    high = 1
    while not is_bound(high):
        high *= 2
        if high > MOST_AT_ONCE:
            return None
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bound(middle) else (middle, high)
    return high


def _kv_layers(architecture: Architecture, *, keys_alone: bool) -> list[KvLayers]:
    caches = [layer.kv for layer in architecture.storage if layer.kv is not None]
    kept = Counter((kv.num_heads, kv.key_dim, 0 if kv.latent and keys_alone else kv.value_dim) for kv in caches)
    return [KvLayers(count, *sizes) for sizes, count in kept.items()]

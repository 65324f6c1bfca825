"""One model of a server: its source, the memory that it needs, and whether it is loaded."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from unspool.config import EngineConfig
from unspool.errors import EngineClosedError, UnspoolError
from unspool.models.overridden import overridden
from unspool.server.config import ServerConfig
from unspool.server.faults import HTTPFault
from unspool.server.metrics import Continued, Families, Metrics
from unspool.server.service import Service, Workers

if TYPE_CHECKING:
    from unspool.models.checkpoint import Checkpoint

log = logging.getLogger("unspool.server")
State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
CONTEXTS = 4  # whole contexts that fit in a model's KV cache by default
LOG_SECONDS = 2.0  # between two lines of a load's progress


@dataclass(frozen=True)
class ModelSpec:
    """A model that requests can name. The first name is its own, the others are aliases."""

    names: tuple[str, ...]
    source: str | Path  # as for LLM
    random: str | None = None  # a shape of random weights instead
    options: Mapping[str, Any] = field(default_factory=dict)  # EngineConfig's

    def open(self, on_fetch: Callable[[str, int, int | None], None] | None = None) -> Checkpoint:
        """The model's headers. Files that are missing are downloaded."""
        if self.random is not None:
            from unspool.models.random import stand_in

            return stand_in(self.random)
        from unspool.models.checkpoint import open_checkpoint
        from unspool.weights.store import resolve

        return open_checkpoint(resolve(self.source, progress=on_fetch))


@dataclass(frozen=True)
class Needs:
    """The memory that a model needs, from its headers. Sizes in bytes."""

    disk: int
    weights: int
    cache: int  # keys and values, when the cache is full
    states: int  # of recurrent layers and their snapshots
    kv_tokens: int
    context_length: int

    @property
    def memory(self) -> int:
        return self.weights + self.cache + self.states

    @property
    def options(self) -> dict[str, int]:
        """The options of EngineConfig that lead to these sizes."""
        return {"kv_tokens": self.kv_tokens, **({"state_bytes": self.states} if self.states else {})}


def needs_of(checkpoint: Checkpoint, options: Mapping[str, Any], budget: int | None) -> Needs:
    """What a model needs within a budget. By default its KV cache has room for four whole contexts or a quarter of the
    budget, whichever is less, but at least for one context if that fits in half of what the weights leave."""
    from unspool.ops import uses_cuda
    from unspool.planning import Planner, Target

    config = EngineConfig(**options)
    kind: Literal["cpu", "cuda"] = "cuda" if uses_cuda(config) else "cpu"
    size = budget if budget is not None else 1 << 60
    planner = Planner(
        checkpoint.name, checkpoint.config, checkpoint.weights, config, Target("this server", kind, size, size)
    )
    plan, sizes = planner.plan(), planner.sizes
    if config.kv_tokens is not None:
        blocks = sizes.blocks()
    else:
        left = max(0, size - plan.weight_bytes)
        blocks = sizes.shares(max(1, sizes.most(CONTEXTS, size // 4), sizes.most(1, left // 2)))
    tokens = blocks[0] * config.with_device_defaults(kind).block_size
    states = plan.num_states * plan.state_bytes
    disk = sum(weight.nbytes for weight in checkpoint.weights.values())
    return Needs(disk, plan.weight_bytes, sizes.nbytes(blocks), states, tokens, plan.context_length)


class LoadingStoppedError(EngineClosedError):
    """A model is not needed any more, or the server ends."""


class HostedModel(Families):
    """A model that may be loaded and unloaded; only the event loop's thread changes it.

    `num_users` counts requests that use it or wait for it: a model in use is never unloaded.
    """

    def __init__(self, spec: ModelSpec, config: ServerConfig) -> None:
        super().__init__(config.metrics_prefix, spec.names[0])
        self.spec, self.config = spec, replace(config, names=spec.names)
        self.name, self.names = spec.names[0], spec.names
        self.root: str | None = None  # its files' own name, once they were read
        self.service: Service | None = None
        self.state: State = "unloaded"
        self.progress = 0.0  # the share of a load that is done
        self.fault: HTTPFault | None = None  # why the last load failed, and when that was
        self.failed_at = 0.0
        self.needs: Needs | None = None  # None: its headers were not read yet
        self.num_users = self.num_waiting = 0
        self.is_wished = False  # a caller wants it loaded, without waiting
        self.is_stopped = False  # its load must end
        self.last_used = 0.0
        self.created = int(time.time())
        self.metrics = Metrics()
        self.statistics = Continued()
        self.num_loads = self.num_unloads = self.num_failures = 0
        self.load_seconds = 0.0
        self._logged = 0.0  # when a load's progress was

    @classmethod
    def fixed(cls, service: Service) -> HostedModel:
        """A model that is loaded and is never unloaded."""
        model = cls(ModelSpec(service.names, service.name), service.config)
        model.service, model.state, model.progress, model.metrics = service, "loaded", 1.0, service.metrics
        model.created, model.num_loads, model.root = service.created, 1, service.llm.checkpoint.name
        model.statistics.attach(service.statistics)
        return model

    @property
    def is_busy(self) -> bool:
        return self.num_users > 0

    # Loading, in a thread of its own --------------------------------------------------------------------------------
    def examine(self, budget: int | None) -> Needs:
        """Read the headers, once; missing files are downloaded."""
        if self.needs is None:
            checkpoint = overridden(self.spec.open(self._on_fetch), EngineConfig(**self.spec.options))
            self.root = checkpoint.name
            self.needs = needs_of(checkpoint, self.spec.options, budget)
        return self.needs

    def build(self, workers: Workers) -> Service:
        """The model, ready to answer."""
        from unspool.llm import LLM

        assert self.needs is not None
        options = {**self.spec.options, **self.needs.options}
        self._logged = time.monotonic()
        llm = LLM(self.spec.open(self._on_fetch), on_progress=self._on_progress, **options)
        try:
            return Service(llm, self.config, metrics=self.metrics, workers=workers)
        except BaseException:
            llm.close()
            raise

    def _on_fetch(self, what: str, done: int, total: int | None) -> None:
        self._on_progress(0.0)

    def _on_progress(self, share: float) -> None:
        if self.is_stopped:
            raise LoadingStoppedError(f"the model {self.name!r} is not loaded any more: the server is shutting down")
        self.progress = share
        now = time.monotonic()
        if now - self._logged >= LOG_SECONDS and share < 1:
            self._logged = now
            log.info("loading %s: %.0f%%", self.name, 100 * share)

    # Reporting ------------------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        """The entry of /v1/models."""
        service, needs = self.service, self.needs
        entry: dict[str, Any] = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "unspool",
            "root": self.root or str(self.spec.source),
            "aliases": list(self.aliases),
            "max_model_len": None if needs is None else needs.context_length,
            "state": self.shown_state,
            "status": {"value": _STATUS[self.shown_state]},
        }
        if service is not None:
            entry["max_model_len"] = service.llm.engine.context_length
        if needs is not None:
            entry |= {"size_bytes": needs.disk, "memory_bytes": needs.memory}
        if self.state == "loading":
            entry["progress"] = round(self.progress, 3)
            entry["status"]["progress"] = entry["progress"]
        if self.fault is not None and self.state == "failed":
            entry["error"] = str(self.fault)
            entry["status"]["failed"] = True
        return entry

    @property
    def aliases(self) -> tuple[str, ...]:
        names = dict.fromkeys([*self.names, *([self.root] if self.root is not None else [])])
        return tuple(name for name in names if name != self.name)

    @property
    def shown_state(self) -> State:
        if self.service is not None and self.service.engine.failure is not None:
            return "failed"
        return self.state

    def collect(self) -> Iterator[Metric]:
        """Metrics of loading; those of its answers and its engine are `metrics` and `statistics`."""
        needs = self.needs
        held = needs.memory if needs is not None and self.state in ("loaded", "unloading") else 0
        yield self._gauge("model_loaded", "1 while the model is loaded.", float(self.state == "loaded"))
        yield self._gauge("model_memory_bytes", "Planned for it while it is loaded.", held)
        yield self._gauge("model_requests_waiting", "Requests that wait for it to be loaded.", self.num_waiting)
        yield self._counter("model_loads", "Times that it was loaded.", self.num_loads)
        yield self._counter("model_load_failures", "Times that it could not be loaded.", self.num_failures)
        yield self._counter("model_unloads", "Times that it was unloaded.", self.num_unloads)
        yield self._counter("model_load_seconds", "Time that loading it took.", self.load_seconds)

    def collectors(self) -> Iterator[Collector]:
        from unspool.server.metrics import AnswerCollector

        yield AnswerCollector(self.config.metrics_prefix, self.name, self.metrics)
        yield self.statistics
        yield self


# llama.cpp's words for the same.
_STATUS: Mapping[str, str] = {
    "unloaded": "unloaded",
    "loading": "loading",
    "loaded": "loaded",
    "unloading": "unloaded",
    "failed": "unloaded",
}


def load_fault(name: str, error: BaseException) -> HTTPFault:
    """The error for requests to a model that could not be loaded."""
    if isinstance(error, HTTPFault):
        return error
    why = str(error) if isinstance(error, UnspoolError) else f"{type(error).__name__}: {error}"
    return HTTPFault(500, f"the model {name!r} could not be loaded: {why}", code="model_load_failed")


def unload(service: Service) -> None:
    """End a model's engine and free its memory. Runs in a thread, because the engine's last step may take a while."""
    assert service.local is not None
    service.local.close()
    del service
    give_back()


def give_back() -> None:
    """Make Python and the C library return unused memory to the system."""
    import ctypes

    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # not every C library can
        return

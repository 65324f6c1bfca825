"""The models of a server: loaded on demand, and unloaded to keep all of them within a memory budget.

Invariants:

- A model in use is never unloaded: a request holds a lease on its model until its response is written.
- A request for a loaded model never waits for a load: loading runs in other threads and changes no loaded model.
- `_held` is the planned memory of all models that are being loaded, are loaded or are being unloaded. It never exceeds
  the budget.
- Everything here runs in the event loop's thread, except a model's `examine` and `build`, and `unload`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unspool.engine.driver import call_soon
from unspool.errors import EngineClosedError, EngineDiedError, QueueFullError
from unspool.server.config import ServerConfig
from unspool.server.faults import HTTPFault
from unspool.server.hosted import HostedModel, LoadingStoppedError, load_fault, unload
from unspool.server.keys import KeyRing
from unspool.server.metrics import ServerMetrics
from unspool.server.service import Service, Workers, unknown_model

log = logging.getLogger("unspool.server")
RETRY_SECONDS = 10.0  # after which a model that could not be loaded is tried again
END_SECONDS = 5.0  # for a load to notice that the server ends
T = TypeVar("T")


class Lease:
    """The use of a model by one request, from its arrival until `release`."""

    def __init__(self, host: ModelHost, model: HostedModel) -> None:
        host.check_open()
        self.model, self._host = model, host
        self.service: Service | None = model.service  # None: it has to be loaded first
        self._is_held = True
        model.num_users += 1

    async def wait(self) -> Service:
        """The model, once it is loaded."""
        while self.service is None:
            await self._host.wait_for(self.model)
            self.service = self.model.service
        return self.service

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._host.leave(self.model)


class ModelHost:
    """`budget`: bytes that all loaded models may use together; None if all models are already loaded."""

    def __init__(self, models: Sequence[HostedModel], config: ServerConfig, budget: int | None = None) -> None:
        self.models, self.config, self.budget = list(models), config, budget
        self.workers = Workers()
        self.keys = KeyRing(config)
        self.metrics = ServerMetrics(config.metrics_prefix, self._collectors)
        self._by_name: dict[str, HostedModel] = {}
        for model in self.models:
            for name in model.names:
                self._by_name.setdefault(name, model)
        self._held = 0
        self._is_draining = False
        self._changed = asyncio.Event()
        self._room = asyncio.Lock()  # models wait for memory in order
        self._building = asyncio.Lock()  # one at a time: another would only make both slower
        self._tasks: dict[HostedModel, asyncio.Task[None]] = {}  # loading or unloading

    # What there is --------------------------------------------------------------------------------------------------
    @property
    def default(self) -> HostedModel:
        """The model for requests that do not name one."""
        return self.models[0]

    def find(self, name: str | None) -> HostedModel:
        """The model with this name or alias; the fault for an unknown name suggests the nearest."""
        if name is None:
            return self.default
        found = self._by_name.get(name) or next((model for model in self.models if model.root == name), None)
        if found is None:
            raise unknown_model(name, [name for model in self.models for name in (model.name, *model.aliases)])
        return found

    def loaded(self, name: str | None) -> Service:
        """A loaded model, for reports that must not load it; without a name, the default one, else the most recently
        used."""
        found = self.find(name)
        if found.service is None and name is None:
            found = max(self.models, key=lambda model: (model.service is not None, model.last_used))
        if found.service is None:
            raise HTTPFault(503, f"the model {found.name!r} is not loaded", code="model_not_loaded")
        return found.service

    @property
    def services(self) -> list[Service]:
        return [model.service for model in self.models if model.service is not None]

    @property
    def failure(self) -> EngineDiedError | None:
        """The error of an engine that died, if any: the process must then be restarted."""
        return next((each.engine.failure for each in self.services if each.engine.failure is not None), None)

    @property
    def state(self) -> str:
        """ready | draining | failed"""
        if self.failure is not None:
            return "failed"
        states = {service.state for service in self.services}
        return "draining" if self._is_draining or "draining" in states else "ready"

    @property
    def num_open(self) -> int:
        return sum(service.engine.num_open for service in self.services)

    @property
    def num_waiting(self) -> int:
        return sum(model.num_waiting for model in self.models)

    # Using a model --------------------------------------------------------------------------------------------------
    def leave(self, model: HostedModel) -> None:
        model.num_users -= 1
        model.last_used = time.monotonic()
        self._notify()

    async def wait_for(self, model: HostedModel) -> None:
        """Wait for one attempt to load it."""
        if model.num_waiting >= self.config.max_loading:
            raise QueueFullError(
                f"{model.num_waiting:,} requests are waiting for the model {model.name!r} to be loaded; try again later"
            )
        model.num_waiting += 1
        try:
            await asyncio.shield(self._load_soon(model))
        finally:
            model.num_waiting -= 1
            self._notify()

    def check_open(self) -> None:
        if self._is_draining:
            raise EngineClosedError("the server is shutting down; no new requests are taken")

    # Loading --------------------------------------------------------------------------------------------------------
    def load(self, model: HostedModel) -> None:
        """Start to load a model, although no request waits for it."""
        self.check_open()
        if model.service is None:
            model.is_wished = True
            self._load_soon(model).add_done_callback(_retrieve)

    def _load_soon(self, model: HostedModel) -> asyncio.Task[None]:
        task = self._tasks.get(model)
        if task is None:
            task = self._tasks[model] = asyncio.create_task(self._load(model))
            task.add_done_callback(_retrieve)
        return task

    async def _load(self, model: HostedModel) -> None:
        """Load a model. Waiting requests get the reason if it fails."""
        if model.fault is not None and time.monotonic() - model.failed_at < RETRY_SECONDS:
            del self._tasks[model]
            raise HTTPFault(model.fault.status, str(model.fault), code=model.fault.code, headers=model.fault.headers)
        model.state, model.progress, model.fault, started = "loading", 0.0, None, time.monotonic()
        reserved = 0
        try:
            needs = await in_thread(lambda: model.examine(self.budget))
            await self._reserve(model, needs.memory)
            reserved = needs.memory
            async with self._building:
                self._check_wanted(model)
                log.info("loading %s (%s in memory)", model.name, _size(needs.memory))
                model.service = await in_thread(lambda: model.build(self.workers))
        except BaseException as error:
            self._held -= reserved
            self._fail(model, error)
            raise
        else:
            model.state, model.progress, seconds = "loaded", 1.0, time.monotonic() - started
            model.num_loads, model.load_seconds = model.num_loads + 1, model.load_seconds + seconds
            model.statistics.attach(model.service.statistics)
            model.last_used = time.monotonic()
            log.info("loaded %s in %.1f s: context %s tokens", model.name, seconds,
                     f"{model.service.llm.engine.context_length:,}")  # fmt: skip
        finally:
            model.is_wished = False
            del self._tasks[model]
            self._notify()

    def _fail(self, model: HostedModel, error: BaseException) -> None:
        model.progress = 0.0
        if isinstance(error, EngineClosedError | asyncio.CancelledError):
            model.state = "unloaded"
            return
        fault = load_fault(model.name, error)
        model.state, model.fault, model.failed_at = "failed", fault, time.monotonic()
        model.num_failures += 1
        log.error("%s", fault)
        if fault is not error:
            raise fault from error

    def _check_wanted(self, model: HostedModel) -> None:
        if self._is_draining:
            raise LoadingStoppedError("the server is shutting down; no new requests are taken")
        if not model.is_wished and not model.num_users:
            raise LoadingStoppedError(f"nobody waits for the model {model.name!r} any more")

    # Memory ---------------------------------------------------------------------------------------------------------
    async def _reserve(self, model: HostedModel, size: int) -> None:
        """Reserve memory for a model; unloads models that no request uses, least recently used first."""
        if self.budget is not None and size > self.budget:
            raise too_large(model, self.budget)
        try:
            async with asyncio.timeout(self.config.memory_wait), self._room:
                while self.budget is not None and self._held + size > self.budget:
                    self._check_wanted(model)
                    self._make_room(size)
                    self._changed.clear()
                    await self._changed.wait()
                self._held += size
        except TimeoutError:
            busy = ", ".join(f"{each.name!r}" for each in self.models if each.service is not None and each.is_busy)
            message = (
                f"the model {model.name!r} could not be loaded: its {_size(size)} do not fit beside "
                f"{busy or 'others'}, in use for {self.config.memory_wait:g} s"
            )
            again = {"retry-after": str(self.retry_after(model))}
            raise HTTPFault(503, message, code="model_not_loaded", headers=again) from None

    def _make_room(self, size: int) -> None:
        """Start to unload enough unused models; none if all unused ones together would not be enough."""
        assert self.budget is not None
        leaving = sum(_held_by(model) for model in self.models if model.state == "unloading")
        lacking = self._held - leaving + size - self.budget
        idle = sorted((model for model in self.models if self._may_leave(model)), key=lambda model: model.last_used)
        if sum(map(_held_by, idle)) < lacking:
            return
        for model in idle:
            if lacking <= 0:
                return
            lacking -= _held_by(model)
            self._unload_soon(model)

    def _may_leave(self, model: HostedModel) -> bool:
        return model.state == "loaded" and not model.is_busy and model.needs is not None and model not in self._tasks

    def unload(self, model: HostedModel) -> None:
        """Start to unload a model; a fault if a request uses it."""
        if model.service is None:
            raise HTTPFault(409, f"the model {model.name!r} is not loaded", code="model_not_loaded")
        if not self._may_leave(model):
            why = "it stays" if model.needs is None else f"{model.num_users:,} requests use it"
            raise HTTPFault(409, f"the model {model.name!r} cannot be unloaded: {why}", code="model_in_use")
        self._unload_soon(model)

    def _unload_soon(self, model: HostedModel) -> None:
        model.state = "unloading"
        service, model.service = model.service, None
        assert service is not None
        self._tasks[model] = asyncio.create_task(self._unload(model, service))

    async def _unload(self, model: HostedModel, service: Service) -> None:
        used = time.monotonic() - model.last_used
        try:
            model.statistics.attach(None)
            act = _unloader(service)
            del service  # the thread has the last reference
            await in_thread(act)
        finally:
            self._held -= _held_by(model)
            model.state = "unloaded"
            model.num_unloads += 1
            del self._tasks[model]
            log.info("unloaded %s, last used %.0f s ago", model.name, used)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()

    # Ending ---------------------------------------------------------------------------------------------------------
    async def shutdown(self, drain: float = 0.0) -> None:
        """Accept no new requests, end loads, let running requests finish within the drain, then abort the rest."""
        self._is_draining = True
        for model in self.models:
            model.is_stopped = True
        self._notify()
        await asyncio.gather(*(service.engine.shutdown(drain) for service in self.services))
        if self._tasks:
            _, late = await asyncio.wait(self._tasks.values(), timeout=END_SECONDS)
            for task in late:  # a download, which ends with the process
                task.cancel()
            await asyncio.gather(*(service.engine.shutdown() for service in self.services))

    # Reporting ------------------------------------------------------------------------------------------------------
    def retry_after(self, model: HostedModel | None = None) -> int:
        """Seconds after which a model's queue probably has room."""
        return max(each.metrics.typical_wait() for each in ([model] if model is not None else self.models))

    async def metrics_page(self) -> bytes:
        """The body of /metrics."""
        if len(self.models) == 1 and self.budget is None:
            return await self.services[0].metrics_page()  # which may query other processes
        return self.metrics.page()

    def _collectors(self) -> Iterator[Collector]:
        for model in self.models:
            yield from model.collectors()
        yield HostCollector(self)
        yield self.keys


class HostCollector(Collector):
    """Metrics of all models together."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    def collect(self) -> Iterable[Metric]:
        host = self._host
        yield self._gauge("ready", "1 while new requests are taken, as /ready says.", host.state == "ready")
        yield self._gauge("engine_failed", "1 after an engine has died.", host.failure is not None)
        if host.budget is not None:
            yield self._gauge("memory_budget_bytes", "What all loaded models may take.", host.budget)
            yield self._gauge("memory_planned_bytes", "What they take of it.", host._held)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._host.config.metrics_prefix + name, text)
        family.add_metric([], float(value))
        return family


def host_of(served: Service | ModelHost) -> ModelHost:
    """The host of a service: one with only its model, made once."""
    if isinstance(served, ModelHost):
        return served
    if served.host is None:
        served.host = ModelHost([HostedModel.fixed(served)], served.config)
        served.host.workers = served.workers
    host: ModelHost = served.host
    return host


def too_large(model: HostedModel, budget: int) -> HTTPFault:
    needs = model.needs
    assert needs is not None
    parts = f"weights {_size(needs.weights)}, KV cache of {needs.kv_tokens:,} tokens {_size(needs.cache)}"
    message = (
        f"the model {model.name!r} needs {_size(needs.memory)} ({parts}), more than the {_size(budget)} that "
        "--memory allows; a smaller --kv-tokens or --max-model-len needs less"
    )
    return HTTPFault(500, message, code="model_too_large")


def _unloader(service: Service) -> Callable[[], None]:
    """A function that unloads a service and has the last reference to it."""
    kept = [service]
    return lambda: unload(kept.pop())


def _held_by(model: HostedModel) -> int:
    return model.needs.memory if model.needs is not None else 0


def _size(value: int) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


async def in_thread(act: Callable[[], T]) -> T:
    """Run a function in its own daemon thread; returns its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(how: Callable[..., None], value: object) -> None:
        if not future.done():
            how(value)

    def run() -> None:
        try:
            how, value = future.set_result, act()
        except BaseException as error:  # a panic of a Rust library is no Exception
            call_soon(loop, settle, future.set_exception, error)
        else:
            call_soon(loop, settle, how, value)

    threading.Thread(target=run, name="unspool-load", daemon=True).start()
    return await future


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve a load's error, so that asyncio does not report it if no request waits any more."""
    if not task.cancelled():
        task.exception()

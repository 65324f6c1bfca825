"""A server's life: load, bind, warn, serve, drain, end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from unspool.engine.driver import call_soon
from unspool.llm import LLM
from unspool.server.app import build
from unspool.server.config import ServerConfig
from unspool.server.connection import Connection
from unspool.server.host import ModelHost, host_of
from unspool.server.listener import Gate, Listener, bind, fit_descriptors
from unspool.server.notify import notifier
from unspool.server.service import Service

log = logging.getLogger("unspool.server")
GRACE = 10.0  # seconds after the drain to write the ends of answers


class Server(uvicorn.Server):
    """When stopped, it accepts no new requests, lets running ones finish within the drain, and aborts the rest."""

    servers: list[Any]  # uvicorn closes whatever is in it

    def __init__(
        self, config: uvicorn.Config, served: Service | ModelHost, on_start: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(config)
        self._host, self._on_start = host_of(served), on_start
        self._notifier = notifier()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again at the end; but a server that stops on request has succeeded."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        if self._host.config.api_key_file is not None:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_hangup)
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        """Schedule a reload of the keys in the event loop; a signal may arrive between any two instructions."""
        if self._loop is not None:
            call_soon(self._loop, self._host.keys.ask)

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Listen with our own limits: asyncio's accept loop spins when descriptors run out."""
        await self.lifespan.startup()
        self._loop = asyncio.get_running_loop()
        config = self._host.config
        gate = Gate(config, fit_descriptors(config.max_connections))

        def make() -> Connection:
            return Connection(gate, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        bound = sockets or bind(config.host, config.port)
        self.servers = [Listener(bound, gate, make)]
        self.started = True
        port = bound[0].getsockname()[1]
        announce(self._host, port)
        if self._on_start is not None:
            self._on_start(address_here(config.host, port))
        if len(self._host.models) == 1:
            self._host.load(self._host.default)
        # At the same time as the first requests, so that starting stays quick.
        self._tasks.append(asyncio.create_task(asyncio.to_thread(self._prepare)))
        self._tasks.append(asyncio.create_task(self._host.keys.watch()))
        self._tasks.append(asyncio.create_task(self._notifier.keep_alive(lambda: self._host.failure is None)))

    def _prepare(self) -> None:
        for service in self._host.services:
            if service.meter is not None:
                service.meter.measure()
            service.warm_up()

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Drain, then close. During the drain, probes and new requests can still connect and get an answer or a
        refusal."""
        host, drain = self._host, self._host.config.drain
        self._notifier.stopping()
        if host.num_open:
            log.info("stopping: %d answers have %g s to finish; Ctrl-C again ends them", host.num_open, drain)
        else:
            log.info("stopping")
        drained = asyncio.create_task(host.shutdown(drain))
        while not drained.done():
            if self.force_exit:  # a second signal
                await host.shutdown()
            await asyncio.wait([drained], timeout=0.1)
        await super().shutdown(sockets)
        await drained
        for task in self._tasks:
            task.cancel()
        log.info("stopped")


def serve(
    llm: LLM, config: ServerConfig, sockets: list[socket.socket], on_start: Callable[[str], None] | None = None
) -> None:
    """Serve on bound sockets until SIGINT or SIGTERM. Raises at the end if the engine failed."""
    set_up_logging()
    run(Service(llm, config), sockets, on_start=on_start)


def run(
    served: Service | ModelHost,
    sockets: list[socket.socket],
    app: Any = None,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Run an application (by default the one of all endpoints) on bound sockets until a signal ends it."""
    host = host_of(served)
    Server(uvicorn_config(app or build(host), host.config), host, on_start).run(sockets)
    if host.failure is not None:
        raise host.failure


def uvicorn_config(app: Any, config: ServerConfig, **more: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # a client could forge its address in the log
        http="httptools",
        timeout_graceful_shutdown=int(GRACE),
        **more,
    )


def set_up_logging(handler: logging.Handler | None = None) -> None:
    """Lines of logs go to a handler, or to stderr."""
    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("unspool.server", "unspool.access", "unspool.engine", "unspool.cluster"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    uvicorn_log = logging.getLogger("uvicorn.error")
    uvicorn_log.handlers, uvicorn_log.propagate = [handler], False
    uvicorn_log.setLevel(logging.WARNING)


def address_here(host: str, port: int) -> str:
    """The address for a browser on this machine; a server that listens on every address is on loopback too."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announce(host: ModelHost, port: int) -> None:
    config = host.config
    address = f"[{config.host}]" if ":" in config.host else config.host
    names = ", ".join(model.name for model in host.models)
    log.info("unspool serves %s at http://%s:%d/v1 (inspector: /, docs: /docs)", names, address, port)
    for service in host.services:
        engine = service.llm.engine
        log.info(
            "context %s tokens, KV cache %s tokens, kernels %s",
            f"{engine.context_length:,}",
            f"{engine.config.kv_tokens:,}",
            service.llm.receipt(0).kernels,
        )
    if host.budget is not None:
        log.info("a model is loaded when it is asked for; all together may take %.1f GB", host.budget / 1e9)
    if not config.has_keys and not config.is_loopback:
        log.warning(
            "\n" + "!" * 79 + "\n"
            "WARNING: %s is reachable from other machines and no --api-key is set:\n"
            "anyone who can connect can use it.\n" + "!" * 79,
            f"{address}:{port}",
        )

"""`unspool serve --replicas N`: a local Ray, the application on it, and its end with a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import serve

from unspool.cluster.app_options import AppOptions
from unspool.cluster.log_relay import LogRelay
from unspool.cluster.models import ModelSource, open_source
from unspool.cluster.ray_deploy import deploy, quiet_ray
from unspool.errors import EngineError
from unspool.machine import num_cores
from unspool.server.config import ServerConfig
from unspool.server.listener import bind
from unspool.server.notify import notifier
from unspool.server.run import address_here, set_up_logging

log = logging.getLogger("unspool.cluster")
# Messages are small and few at a time; Ray would set aside a third of the memory.
OBJECT_STORE_BYTES = 256 << 20
START_TRIES = 4
POLL_SECONDS = 0.5  # between two looks for a signal
LONGEST_FOLDER = 40  # characters: Ray puts sockets below it, whose paths may have 107


class StopSignalError(BaseException):
    """SIGINT or SIGTERM came."""


def serve_ray(
    source: ModelSource, config: ServerConfig, replicas: int, on_start: Callable[[str], None] | None = None
) -> None:
    """Start a Ray of our own, serve until SIGINT or SIGTERM, and leave nothing behind. `on_start` is called with the
    server's address once it listens."""
    set_up_logging()
    service_manager = notifier()
    pause = min(POLL_SECONDS, (service_manager.watchdog_seconds or POLL_SECONDS) / 2)
    name = config.names[0] if config.names else open_source(source).name  # an unusable model is known before Ray starts
    port = _free_port(config)
    threads = source.options.get("threads") or max(1, num_cores() // replicas)
    source = dataclasses.replace(source, options={**source.options, "threads": threads})
    log.info("starting Ray with %d replicas of %d threads; this takes some seconds", replicas, threads)
    try:
        with _stops_on_signals(), local_ray(max(num_cores(), replicas * threads) + 1) as relay:
            asked = options_of(source, config, num_replicas=replicas, log_socket=relay.path)
            deploy(asked, config.host, port)
            log.info("unspool serves %s at http://%s:%d/v1 with %d replicas", name, config.host, port, replicas)
            if on_start is not None:
                on_start(address_here(config.host, port))
            while True:  # and not signal.pause(), which sleeps on where another thread gets the signal
                if service_manager.watchdog_seconds is not None:
                    service_manager.send(WATCHDOG=1)
                time.sleep(pause)
    except StopSignalError:
        service_manager.stopping()
    log.info("stopped")


@contextlib.contextmanager
def _stops_on_signals() -> Iterator[None]:
    """A first SIGINT or SIGTERM raises StopSignalError; while things end, others do nothing."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    listen_for_stops()
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def listen_for_stops() -> None:
    """Ray puts handlers of its own in place when it starts, so this is called again after it."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        log.info("stopping")
        raise StopSignalError

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


@contextlib.contextmanager
def local_ray(num_cpus: int) -> Iterator[LogRelay]:
    """A Ray whose files are in a folder of its own. When this process is killed, another one cleans up after it."""
    short = len(tempfile.gettempdir()) <= LONGEST_FOLDER
    folder = Path(tempfile.mkdtemp(prefix="unspool-ray-", dir=None if short else "/tmp"))
    command = [sys.executable, "-P", "-m", "unspool.cluster.janitor", str(folder)]
    janitor = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    relay = LogRelay(folder / "log")
    try:
        _start_ray(num_cpus, folder)
        yield relay
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        relay.close()
        assert janitor.stdin is not None
        janitor.stdin.close()
        janitor.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _start_ray(num_cpus: int, folder: Path) -> None:
    """Ray gives itself 30 seconds to start, which is too little on a machine that is very busy: then once more."""
    quiet_ray()
    for left in reversed(range(START_TRIES)):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                log_to_driver=False,
                _temp_dir=str(folder),
                _system_config={"worker_niceness": 0},  # Ray's 15 is for batches: this Ray only serves
            )
            break
        except SystemExit:  # a signal came while Ray's own handlers were in place
            raise StopSignalError from None
        except Exception as error:  # Ray has no class for it
            ray.shutdown()
            if not left:
                raise EngineError(f"Ray did not start: {error}") from error
            log.warning("Ray did not start, and is started again: %s", error)
    listen_for_stops()


def _free_port(config: ServerConfig) -> int:
    """The port, known to be free; 0 stands for any."""
    sockets = bind(config.host, config.port)
    port: int = sockets[0].getsockname()[1]
    for each in sockets:
        each.close()
    return port


def options_of(source: ModelSource, config: ServerConfig, **more: Any) -> AppOptions:
    """A server's configuration as the options of an application."""
    defaults = ServerConfig()
    changed = {
        each.name: list(value) if isinstance(value := getattr(config, each.name), tuple) else value
        for each in dataclasses.fields(config)
        if getattr(config, each.name) != getattr(defaults, each.name) and each.name not in ("host", "port")
    }
    return AppOptions(
        model=source.model,
        random=source.random,
        engine=dict(source.options),
        server=changed,
        drain=max(config.drain, 0.1),
        **more,
    )

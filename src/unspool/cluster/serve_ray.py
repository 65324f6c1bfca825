"""`unspool serve --replicas N`: a local Ray, the application on it, and its end with a signal."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from typing import Any

os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")  # read when Serve is imported

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from unspool.cluster.app_options import AppOptions
from unspool.cluster.models import ModelSource
from unspool.errors import EngineError
from unspool.machine import num_cores
from unspool.server.config import ServerConfig
from unspool.server.run import set_up_logging

log = logging.getLogger("unspool.server")
APP = "unspool"


def serve_ray(source: ModelSource, config: ServerConfig, replicas: int) -> None:
    """Start a Ray of our own, serve until SIGINT or SIGTERM, and leave nothing behind."""
    set_up_logging(config)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    threads = source.options.get("threads") or max(1, num_cores() // replicas)
    source = dataclasses.replace(source, options={**source.options, "threads": threads})
    asked = options_of(source, config, num_replicas=replicas)
    log.info("starting Ray with %d replicas of %d threads; this takes some seconds", replicas, threads)
    ray.init(
        address="local",
        num_cpus=max(num_cores(), replicas * threads) + 1,
        include_dashboard=False,
        configure_logging=True,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    try:
        deploy(asked, config.host, config.port)
        log.info(
            "unspool serves %s at http://%s:%d/v1 with %d replicas", source.model, config.host, config.port, replicas
        )
        stopped.wait()
        log.info("stopping")
    finally:
        serve.shutdown()
        ray.shutdown()
    log.info("stopped")


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


def deploy(asked: AppOptions, host: str, port: int) -> None:
    """Run or update the application on the Ray that this process is connected to, until it is healthy."""
    from unspool.cluster.ray_app import build

    serve.start(
        http_options={"host": host, "port": port, "location": "EveryNode"},
        logging_config=LoggingConfig(log_level="ERROR", enable_access_log=False),
    )
    try:
        serve.run(build(dataclasses.asdict(asked)), name=APP, route_prefix="/", logging_config=None)
    except RuntimeError as error:
        raise EngineError(f"the application could not be deployed: {error}") from error

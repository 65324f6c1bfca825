"""Running the application on the Ray that this process is connected to."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")  # read when Serve is imported

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus, LoggingConfig

from unspool.cluster.app_options import AppOptions
from unspool.errors import EngineError

APP = "unspool"


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """A Ray cluster that runs already."""
    quiet_ray()
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        hint = "; `ray start --head` starts one" if address == "auto" else f": {error}"
        raise EngineError(f"no Ray cluster was found {where}{hint}") from error
    try:
        yield
    finally:
        ray.shutdown()


def quiet_ray() -> None:
    """Ray logs errors only; this command shows the progress itself."""
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


def stop(name: str) -> None:
    """End an application, and wait until it is gone."""
    serve.delete(name)


def deploy(asked: AppOptions, host: str, port: int, *, name: str = APP, prefix: str = "/") -> bool:
    """Run the application, or update the one of this name, until every replica is there. Whether Serve was started for
    it: one that ran already listens where it did."""
    from unspool.cluster.ray_app import build

    application = build(dataclasses.asdict(asked))
    is_new = not serve.status().proxies
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port}, logging_config=quiet)
    try:
        serve.run(application, name=name, route_prefix=prefix, logging_config=None)
    except RuntimeError as error:
        raise EngineError(f"the application could not be deployed: {why_not(name) or error}") from error
    return is_new


def why_not(name: str) -> str:
    """What an application's replicas say that keeps it from running; empty if nothing."""
    found = serve.status().applications.get(name)
    if found is None or found.status == ApplicationStatus.RUNNING:
        return ""
    messages = [each.message for each in found.deployments.values() if each.message]
    return "; ".join(_last_line(message) for message in messages or [found.message])


def _last_line(message: str) -> str:
    """Of a traceback, what was raised."""
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def describe(name: str) -> dict[str, Any]:
    """The state of the application and of its deployments; empty if there is none of this name."""
    found = serve.status().applications.get(name)
    if found is None:
        return {}
    return {
        "status": found.status.value,
        "message": found.message,
        "deployments": {
            each: {"status": one.status.value, "replicas": dict(one.replica_states), "message": one.message}
            for each, one in found.deployments.items()
        },
    }

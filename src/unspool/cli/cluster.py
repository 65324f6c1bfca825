"""unspool cluster: run an application of several replicas on a Ray cluster."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unspool.cli.parser import Parser, UsageError

if TYPE_CHECKING:
    from unspool.cluster.app_options import AppOptions

DESCRIPTION = """\
Run an application of several replicas on a Ray cluster that is there already, or update the one that runs: replicas
with another model, other options or other code are replaced one after the other, while the rest goes on answering. The
file says what to serve, as in docs/cluster.md."""
EPILOG = """\
examples:
  ray start --head                     a cluster of this machine; `ray start --address=HOST:6379` adds others
  unspool cluster app.yaml             run or update the application, wait until it is healthy
  unspool cluster --status
  unspool cluster --stop

app.yaml:
  model: smollm2
  num_replicas: 2
  engine: {threads: 4}"""
NEEDS_RAY = "needs Ray: pip install 'unspool[server,cluster]'"


def main(argv: Sequence[str]) -> int:
    parser = Parser("cluster", "[APP.yaml] [options]", DESCRIPTION, EPILOG)
    parser.add_argument("app", nargs="?", type=Path, metavar="APP.yaml", help="what to serve: YAML or JSON")
    parser.add_argument("--address", default="auto", help="of the cluster: HOST:PORT; auto is the one of this machine")
    parser.add_argument("--name", default="unspool", help="of the application (unspool)")
    parser.add_argument("--prefix", default="/", metavar="PATH", help="where its paths begin (/)")
    parser.add_argument("--host", default="127.0.0.1", help="that Serve listens on, if it does not run yet (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="the same: its port (8000)")
    parser.add_argument("--status", action="store_true", help="print the application's state as JSON")
    parser.add_argument("--stop", action="store_true", help="end the application; the cluster and Serve go on")
    parser.add_common()
    namespace = parser.parse_args(argv)
    if (namespace.app is not None) + namespace.status + namespace.stop != 1:
        raise UsageError("cluster takes a file, --status or --stop")
    asked = None if namespace.app is None else read_app(namespace.app)
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"cluster {NEEDS_RAY}") from error
    return _run(namespace, asked)


def read_app(path: Path) -> AppOptions:
    """The options in a file, checked; a model's path is made absolute, since replicas run elsewhere."""
    try:
        from unspool.cluster.app_options import AppOptions
    except ModuleNotFoundError as error:
        raise UsageError(f"cluster needs {error.name}: pip install 'unspool[server,cluster]'") from error
    from unspool.errors import RequestError

    text = path.read_text("utf-8")
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise UsageError(f"cluster {NEEDS_RAY}") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RequestError(f"{path} is no YAML: {' '.join(str(error).split())}", "app") from None
    if not isinstance(values, dict):
        raise RequestError(f"{path} must hold options by name, as in `model: smollm2`", "app")
    model = values.get("model")
    if isinstance(model, str) and (path.parent / model).exists():
        values["model"] = str((path.parent / model).resolve())
    return AppOptions.of(values)


def _run(namespace: Namespace, asked: AppOptions | None) -> int:
    from unspool.cluster import ray_deploy

    with ray_deploy.connected(namespace.address):
        if namespace.status:
            state = ray_deploy.describe(namespace.name)
            print(json.dumps(state or {"status": "NOT_STARTED"}, indent=2))
            return 0 if state.get("status") == "RUNNING" else 1
        if namespace.stop:
            if not ray_deploy.describe(namespace.name):
                raise UsageError(f"no application {namespace.name!r} runs there")
            ray_deploy.stop(namespace.name)
            return 0
        assert asked is not None
        host, port = namespace.host, namespace.port
        is_new = ray_deploy.deploy(asked, host, port, name=namespace.name, prefix=namespace.prefix)
        where = f"http://{host}:{port}" if is_new else "the address of the Serve that was running, under "
        print(f"unspool serves {asked.random or asked.model} at {where}{namespace.prefix.rstrip('/')}/v1")
    return 0

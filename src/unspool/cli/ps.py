"""unspool ps: the servers of this user that run on this machine, and the models that they have loaded."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from unspool.cli.parser import Parser
from unspool.cli.running import Running, running
from unspool.records import record

DESCRIPTION = """\
List the servers that `unspool serve` and `unspool inspect` run on this machine for this user, with the models that each
has loaded. A server that wants keys is not asked; the models that it was started with are listed."""
ASK_SECONDS = 2.0


@record(frozen=True)
class Report:
    """A server's own report."""

    state: str  # from /ready, or silent
    models: list[dict[str, Any]]  # id, and state if it is reported


def make_parser() -> Parser:
    parser = Parser("ps", "[--json]", DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="one array of objects")
    parser.add_common()
    return parser


def main(argv: Sequence[str]) -> int:
    namespace = make_parser().parse_args(argv)
    found = [(one, ask(one)) for one in running()]
    if namespace.json:
        print(json.dumps([as_object(one, report) for one, report in found]))
        return 0
    from unspool.cli.terminal import note, show

    if not found:
        note("no server runs here; `unspool serve` starts one")
        return 0
    rows = [("pid", "address", "state", "up", "memory", "models")]
    for one, report in found:
        memory = memory_of(one.pid)
        names = ", ".join(_named(model) for model in report.models)
        up = _span(time.time() - one.started)
        rows.append((str(one.pid), one.url, report.state, up, "–" if memory is None else _size(memory), names))
    sizes = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        show("  ".join([*(cell.ljust(size) for cell, size in zip(row, sizes, strict=False)), row[-1]]))
    return 0


def ask(one: Running) -> Report:
    ready = _get(f"{one.url}/ready")
    if ready is None:
        return Report("silent", [{"id": name} for name in one.models])
    listed = _get(f"{one.url}/v1/models")
    models = listed.get("data") if listed is not None else None
    if not isinstance(models, list):  # it requires a key
        models = [{"id": name} for name in one.models]
    return Report(str(ready.get("status", "?")), models)


def _get(url: str) -> dict[str, Any] | None:
    """The JSON object at an address, whatever the status; None: no answer, or not a JSON object."""
    import http.client
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for this machine
    try:
        with opener.open(url, timeout=ASK_SECONDS) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            found = json.load(error)
        except ValueError:
            return None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return found if isinstance(found, dict) else None


def as_object(one: Running, report: Report) -> dict[str, Any]:
    return {
        "pid": one.pid,
        "url": one.url,
        "state": report.state,
        "started": one.started,
        "version": one.version,
        "memory_bytes": memory_of(one.pid),
        "models": report.models,
    }


def memory_of(pid: int) -> int | None:
    """The resident memory of a process, if the system reports it."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            line = next(line for line in file if line.startswith("VmRSS:"))
        return 1024 * int(line.split()[1])
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _named(model: dict[str, Any]) -> str:
    state = model.get("state")
    return str(model.get("id")) if state in (None, "loaded", "ready") else f"{model.get('id')} ({state})"


def _size(count: int) -> str:
    from unspool.cli.terminal import human_bytes

    return human_bytes(count)


def _span(seconds: float) -> str:
    """A duration: 12 s, 5 min, 3 h, 2 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"

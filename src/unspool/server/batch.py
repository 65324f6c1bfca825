"""Requests from a file in OpenAI's batch format, answered by the same endpoints, into a file of results.

    requests.jsonl   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
    results.jsonl    {"id": …, "custom_id": "a", "response": {"status_code": 200, "body": {…}, …}, "error": null}

Results are appended as they finish and flushed to disk in groups. A kill at any moment leaves whole lines and at most
one incomplete last line. The next run drops that line, reads which requests have a result, and runs the others.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from unspool.errors import RequestError
from unspool.server import endpoints
from unspool.server.dialect import Body
from unspool.server.faults import HTTPFault, fault_of
from unspool.server.http import parse_object
from unspool.server.kinds import Checker, integer, mapping, record, string, word
from unspool.server.service import Service
from unspool.server.sse import dumps

SYNC_SECONDS = 1.0  # between two flushes to disk: the work that a power failure can lose
LINE = record(
    {
        "custom_id": string(minLength=1, maxLength=512),
        "method": word("POST"),
        "url": word(*endpoints.BATCHED),
        "body": mapping(),
    },
    required=("custom_id", "method", "url", "body"),
)
RESULT = record(
    {"custom_id": string(minLength=1), "response": record({"status_code": integer()}, required=("status_code",))},
    required=("custom_id", "response"),
)


@dataclass(frozen=True)
class Line:
    number: int
    custom_id: str
    url: str
    body: Body


@dataclass
class Progress:
    total: int
    done: int  # before this run
    failed: int = 0  # refusals, including those of earlier runs
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    answered: int = 0  # in this run


def read_requests(path: Path) -> list[Line]:
    """All lines, checked before anything is computed: a file with a wrong line is refused by its number."""
    lines: list[Line] = []
    seen: dict[str, int] = {}
    for number, text in _lines(path):
        where = f"{path.name}, line {number}"
        try:
            value = parse_object(text)
            Checker().check(LINE, value)
        except RequestError as error:
            raise RequestError(f"{where}: {error}", error.param) from None
        if value["custom_id"] in seen:
            first = seen[value["custom_id"]]
            raise RequestError(f"{where}: custom_id {value['custom_id']!r} is that of line {first}", "custom_id")
        seen[value["custom_id"]] = number
        if value["body"].get("stream"):
            raise RequestError(f"{where}: a batch does not stream", "body.stream")
        lines.append(Line(number, value["custom_id"], value["url"], value["body"]))
    return lines


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}", "requests") from error


class Results:
    """The output file: the results that it already has, and appending new ones."""

    def __init__(self, path: Path) -> None:
        self.done: dict[str, bool] = {}  # the ids that have a result: whether it is an answer (else a refusal)
        try:
            whole = self._read(path) if path.exists() else 0
            # Unbuffered: what was written survives a kill. Only a crash of the machine can lose the last second of it.
            self._file: BinaryIO = path.open("r+b" if path.exists() else "w+b", buffering=0)
            self._file.truncate(whole)  # an incomplete last line is dropped, and its request runs again
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}", "output") from error
        self._file.seek(whole)
        self._synced = time.monotonic()

    def num_refused(self, lines: list[Line]) -> int:
        """The number of these lines whose result is a refusal."""
        return sum(not self.done.get(line.custom_id, True) for line in lines)

    def _read(self, path: Path) -> int:
        """Note the ids that have results; returns the length of the complete lines in bytes."""
        whole = 0
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    break
                try:
                    Checker(lenient=True).check(RESULT, result := parse_object(text))
                except RequestError as error:
                    message = f"{path}, line {number} is no result ({error}); give another -o"
                    raise RequestError(message, "output") from None
                self.done[result["custom_id"]] = result["response"]["status_code"] == 200
                whole += len(text)
        return whole

    def append(self, result: Body) -> None:
        self._file.write(dumps(result) + b"\n")
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        self.sync()
        self._file.close()


async def run_batch(
    service: Service,
    lines: list[Line],
    results: Results,
    *,
    concurrency: int,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Answer every line that has no result yet, `concurrency` at a time, so that the engine's batch stays full."""
    left = [line for line in lines if line.custom_id not in results.done]
    progress = Progress(len(lines), len(lines) - len(left), results.num_refused(lines))
    queue = iter(left)

    async def work() -> None:
        for line in queue:
            result = await answer(service, line)
            results.append(result)
            progress.answered += 1
            progress.failed += result["response"]["status_code"] != 200
            progress.tokens += _num_tokens(result["response"]["body"])
            on_progress(progress)

    on_progress(progress)
    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(left)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        results.sync()
    return progress


async def answer(service: Service, line: Line) -> Body:
    """A line's result. A request's own error becomes its result; an error of the engine is raised."""
    try:
        copied = deepcopy(line.body)  # checking removes nulls; the caller's line stays unchanged
        status, body = 200, await endpoints.answer(service, endpoints.ENDPOINTS[line.url], copied)
    except Exception as error:
        fault = fault_of(error)
        if not isinstance(error, RequestError | HTTPFault):
            raise
        status, body = fault.status, fault.anthropic() if line.url.startswith("/v1/messages") else fault.openai()
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}", "body": body},
        "error": None,
    }


def _num_tokens(body: Any) -> int:
    usage = body.get("usage") or {}
    count: int = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return count

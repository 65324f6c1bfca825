"""unspool batch: a file of requests, a file of results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unspool.cli import flags
from unspool.cli.parser import Parser, UsageError
from unspool.cli.status import LINE_INTERVAL, Status, work_of

if TYPE_CHECKING:
    from unspool.engine.engine import Engine
    from unspool.server.batch import Line, Progress, Results

DESCRIPTION = """\
Answer a file of requests in OpenAI's batch format, as one continuous batch. Results are appended as they come, in the
order in which they are done; started again after a kill, it does what is left, nothing twice. A request that cannot be
honoured has a refusal for its result, which is not tried again: delete its line from RESULTS to do so."""
EPILOG = """\
example:
  echo '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}}' | tr -d '\\n' > requests.jsonl
  unspool batch requests.jsonl -o results.jsonl

exit status: 0 every request has an answer; 3 every request has a result, and some are refusals, of this run or an
earlier one; 2 wrong usage, or a file that cannot be used; 1 failure; 130 stopped with Ctrl-C"""
EXIT_REFUSALS = 3
LOG_INTERVAL = 10.0  # seconds between two lines where there is no terminal


def make_parser() -> Parser:
    parser = Parser("batch", "REQUESTS -o RESULTS [options]", DESCRIPTION, EPILOG)
    parser.add_argument("requests", metavar="REQUESTS", type=Path, help="a JSON lines file of requests")
    parser.add_argument(
        "-o", "--output", metavar="RESULTS", type=Path, required=True, help="where results are appended"
    )
    parser.add_argument("--concurrency", type=int, metavar="N", help="requests at once (as many as run in one step)")
    parser.add_argument("--name", action="append", default=[], metavar="NAME", help="a name that the model answers to")
    parser.add_argument("--lenient", action="store_true", help="ignore unknown fields with a warning in the result")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    flags.add_engine_flags(parser, serving=True)
    parser.add_common()
    return parser


def main(argv: Sequence[str]) -> int:
    namespace = make_parser().parse_args(argv)
    if namespace.concurrency is not None and namespace.concurrency < 1:
        raise UsageError(f"--concurrency is {namespace.concurrency}; it must be at least 1")
    if namespace.output.exists() and namespace.requests.exists() and namespace.output.samefile(namespace.requests):
        raise UsageError("REQUESTS and RESULTS are one file")
    try:
        from unspool.server.batch import Results, read_requests
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise UsageError(f"a batch needs {error.name}: pip install 'unspool[server]'") from error

    lines = read_requests(namespace.requests)
    results = Results(namespace.output)
    try:
        return _answer(namespace, lines, results)
    finally:
        results.close()


def _answer(namespace: argparse.Namespace, lines: list[Line], results: Results) -> int:
    import asyncio

    from unspool.cli.loading import load
    from unspool.cli.served import names_of
    from unspool.cli.terminal import note
    from unspool.server.batch import run_batch
    from unspool.server.config import ServerConfig
    from unspool.server.service import Service

    if all(line.custom_id in results.done for line in lines):
        refused = results.num_refused(lines)
        if not namespace.quiet:
            note(f"All {len(lines):,} requests have a result already, {refused:,} of them a refusal.")
        return EXIT_REFUSALS if refused else 0
    setattr(namespace, "engine.max_waiting", 1 << 30)  # the file is the queue here: nothing is ever refused
    llm, _ = load(namespace)
    names = namespace.name or ([] if namespace.random is not None else names_of(namespace.model))
    config = ServerConfig(names=tuple(names), lenient=namespace.lenient)

    async def run() -> int:
        service = Service(llm, config)
        concurrency = namespace.concurrency or llm.engine.config.max_running
        display = BatchProgress(llm.engine)
        try:
            # Also without a terminal, but less often: the user of a batch may read its log.
            interval = LINE_INTERVAL if namespace.progress else LOG_INTERVAL
            with Status(display.describe, not namespace.quiet, line_interval=interval):
                progress = await run_batch(service, lines, results, concurrency=concurrency, on_progress=display.take)
        finally:
            await service.engine.shutdown()
        if not namespace.quiet:
            note(display.describe())
        return EXIT_REFUSALS if progress.failed else 0

    return asyncio.run(run())


class BatchProgress:
    """Reports on a batch while it runs, and at its end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._progress: Progress | None = None

    def take(self, progress: Progress) -> None:
        self._progress = progress

    def describe(self) -> str:
        import time

        progress = self._progress
        if progress is None:
            return "preparing the requests"
        done = progress.done + progress.answered
        text = f"{done:,} of {progress.total:,} done, {progress.failed:,} refused"
        seconds = time.perf_counter() - progress.started
        if not progress.answered or seconds <= 0:
            return f"{text}, {work_of(self._engine)}"
        left = (progress.total - done) * seconds / progress.answered
        return f"{text}, {progress.tokens / seconds:,.0f} tokens/s, {left:,.0f} s left"

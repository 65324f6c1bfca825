"""unspool serve: OpenAI's API on a port."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unspool.cli import flags
from unspool.cli.parser import Parser, UsageError
from unspool.cli.plan import size
from unspool.cli.served import make_host, model_specs

if TYPE_CHECKING:
    from unspool.llm import LLM
    from unspool.server.config import ServerConfig
    from unspool.server.hosted import ModelSpec

DESCRIPTION = """\
Serve a model with OpenAI's API (chat completions, completions, responses), Anthropic's messages, scoring,
tokenization and Prometheus metrics. Every field of a request is honoured or refused by name (docs/server.md)."""
EPILOG = """\
examples:
  unspool serve
  unspool serve -m model.gguf --port 9000 --api-key-file keys.txt --host 0.0.0.0
  unspool serve -m coder -m chat --memory 12GB      two models, each loaded when it is asked for
  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

SIGTERM or Ctrl-C: no new requests, running ones get --drain seconds, then end with finish reason abort.
SIGHUP: the key file is read again. Under systemd (Type=notify) it reports when it is ready, and that it lives."""
PACKAGES = "starlette uvicorn prometheus_client"


def make_parser(
    command: str = "serve",
    usage: str = "[options]",
    description: str = DESCRIPTION,
    epilog: str = EPILOG,
    *,
    port: int = 8000,
    log: str = "text",
) -> Parser:
    """The options of a command that serves."""
    parser = Parser(command, usage, description, epilog)
    _add_address(parser, port)
    _add_access(parser)
    _add_limits(parser)
    _add_behaviour(parser, log)
    flags.add_engine_flags(parser, serving=True, several=True)
    parser.add_common()
    return parser


def _add_address(parser: Parser, port: int) -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine alone)")
    group.add_argument("--port", type=int, default=port, help=f"port ({port}); 0 picks a free one")
    group.add_argument("--name", action="append", default=[], metavar="NAME", help="a name that the model answers to")
    group.add_argument(
        "--memory", type=size, metavar="SIZE",
        help="what all loaded models may take, as in 12GB: beyond it the least recently used ones are unloaded; "
        "without it, 90%% of what is free at the start",
    )  # fmt: skip
    group.add_argument(
        "--memory-wait", type=float, default=60.0, metavar="S",
        help="how long a model that is to be loaded waits for memory that others are using (60)",
    )  # fmt: skip
    group.add_argument(
        "--replicas", metavar="N|numa[:N]",
        help="N processes with an engine each, on a local Ray (the cluster extra); numa: one on each NUMA node, "
        "numa:N: N of them, without Ray. An answer survives the loss of its replica",
    )  # fmt: skip


def _add_access(parser: Parser) -> None:
    group = parser.add_argument_group("who")
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help="a key that is let in; repeatable")
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE",
        help="a file of keys, one a line, with names and limits (docs/operations.md); read again when it changes and "
        "on SIGHUP",
    )  # fmt: skip
    group.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN", help="an origin whose pages may call"
    )
    group.add_argument(
        "--allow-host", action="append", default=[], metavar="HOST", help="a Host header to take, without keys"
    )
    group.add_argument(
        "--kv-events", metavar="ADDRESS",
        help="publish what the prefix cache holds, for routers: ZeroMQ, as in tcp://*:5557 (the kv-events extra)",
    )  # fmt: skip
    group.add_argument("--kv-events-replay", metavar="ADDRESS", help="where past events can be asked for")


def _add_limits(parser: Parser) -> None:
    group = parser.add_argument_group("limits, which hold before any key is checked")
    group.add_argument("--max-connections", type=int, default=1000, metavar="N", help="open at once (1000)")
    group.add_argument("--max-header-kb", type=float, default=64.0, metavar="KB", help="largest request head (64)")
    group.add_argument("--header-timeout", type=float, default=20.0, metavar="S", help="for a head to arrive (20)")
    group.add_argument("--idle-timeout", type=float, default=75.0, metavar="S", help="kept between requests (75)")


def _add_behaviour(parser: Parser, log: str) -> None:
    group = parser.add_argument_group("how")
    group.add_argument("--lenient", action="store_true", help="ignore unknown fields with a warning in the response")
    group.add_argument("--drain", type=float, default=30.0, metavar="S", help="seconds to finish in when stopped (30)")
    group.add_argument("--max-body-mb", type=float, default=8.0, metavar="MB", help="largest request (8)")
    group.add_argument(
        "--stall-timeout", type=float, default=60.0, metavar="S", help="cut a reader that takes nothing (60)"
    )
    group.add_argument("--log", metavar="FORMAT", default=log, help=f"access log on stderr: text, json or off ({log})")
    group.add_argument("--metrics-prefix", default="unspool:", metavar="P", help="of the metrics' names (unspool:)")
    group.add_argument("--otel-endpoint", metavar="URL", help="send spans there by OTLP over HTTP (the otel extra)")


def main(argv: Sequence[str]) -> int:
    return run(make_parser().parse_args(argv))


def run(namespace: Namespace, on_start: Callable[[str], None] | None = None) -> int:
    """Serve until a signal. `on_start` is called with the server's address once it listens."""
    try:
        import unspool.server.run  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in PACKAGES.split():
            raise
        raise UsageError(f"serving needs {error.name}: pip install 'unspool[server]'") from error
    from unspool.cli.running import registered
    from unspool.server.config import ServerConfig
    from unspool.server.keys import read_keys
    from unspool.server.notify import notifier

    key_file = namespace.api_key_file
    if key_file is not None:
        read_keys(key_file)  # its errors are reported before a model is loaded
    config = ServerConfig(
        host=namespace.host,
        port=namespace.port,
        api_keys=tuple(namespace.api_key),
        api_key_file=None if key_file is None else str(key_file.absolute()),
        cors_origins=tuple(namespace.cors_origin),
        allowed_hosts=tuple(host.lower() for host in namespace.allow_host),
        lenient=namespace.lenient,
        drain=namespace.drain,
        max_connections=namespace.max_connections,
        max_header=int(namespace.max_header_kb * 1024),
        header_timeout=namespace.header_timeout,
        idle_timeout=namespace.idle_timeout,
        max_body=int(namespace.max_body_mb * 1024 * 1024),
        stall_timeout=namespace.stall_timeout,
        log_format=namespace.log,
        metrics_prefix=namespace.metrics_prefix,
        otel_endpoint=namespace.otel_endpoint,
        memory_wait=namespace.memory_wait,
    )
    specs = model_specs(namespace, flags.engine_options(namespace))
    with (
        notifier().starting() as report_ready,
        registered([spec.names[0] for spec in specs], _both(report_ready, on_start)) as listens,
    ):
        return _serve(namespace, specs, config, listens)


def _both(first: Callable[[str], None], second: Callable[[str], None] | None) -> Callable[[str], None]:
    """A function that calls the first, then the second if there is one."""

    def call(address: str) -> None:
        first(address)
        if second is not None:
            second(address)

    return call


def _serve(
    namespace: Namespace, specs: list[ModelSpec], config: ServerConfig, on_start: Callable[[str], None]
) -> int:
    from unspool.chat.template import start_renderer
    from unspool.cli.loading import load
    from unspool.server.listener import bind
    from unspool.server.run import serve

    if len(specs) > 1 or namespace.memory is not None:
        return _serve_several(namespace, specs, config, on_start)
    config = replace(config, names=specs[0].names)
    namespace.model = str(specs[0].source)
    if namespace.replicas is not None:
        return _serve_replicas(namespace, config, on_start)
    sockets = bind(config.host, config.port)  # an unavailable port is reported before a model is loaded
    start_renderer()  # while the weights load
    llm, _ = load(namespace)
    with _published_events(llm, namespace):
        serve(llm, config, sockets, on_start)
    return 0


def _serve_several(
    namespace: Namespace, specs: list[ModelSpec], config: ServerConfig, on_start: Callable[[str], None]
) -> int:
    """Serve models that are loaded on demand; a single one at startup."""
    for flag, value in (("--replicas", namespace.replicas), ("--kv-events", namespace.kv_events)):
        if value is not None:
            raise UsageError(f"{flag} is for one model, without --memory")
    from unspool.chat.template import start_renderer
    from unspool.server.listener import bind
    from unspool.server.run import run, set_up_logging

    set_up_logging()
    sockets = bind(config.host, config.port)
    start_renderer()
    host = make_host(specs, config, namespace.memory)
    run(host, sockets, on_start=on_start)
    return 0


def _serve_replicas(namespace: Namespace, config: ServerConfig, on_start: Callable[[str], None]) -> int:
    """Serve with engines in other processes."""
    kind, _, count = namespace.replicas.partition(":")
    is_numa = kind == "numa"
    if not (is_numa and (not count or _is_count(count))) and not _is_count(namespace.replicas):
        raise UsageError(f"--replicas is {namespace.replicas!r}; allowed: a number from 1, numa, or numa:N")
    if namespace.kv_events is not None:
        raise UsageError("--kv-events is for one engine; with --replicas the server itself routes by prefixes")
    from unspool.cli.loading import all_options, locate
    from unspool.cluster.models import ModelSource

    model = namespace.model if namespace.random is not None else str(locate(namespace.model))
    source = ModelSource(model, namespace.random, all_options(namespace))
    if is_numa:
        from unspool.cluster.serve_local import serve_local

        serve_local(source, config, int(count) if count else None, on_start)
        return 0
    try:
        from unspool.cluster.serve_ray import serve_ray
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "ray":
            raise
        message = "--replicas N needs Ray: pip install 'unspool[server,cluster]'; --replicas numa:N needs none"
        raise UsageError(message) from error
    serve_ray(source, config, int(namespace.replicas), on_start)
    return 0


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 1 <= int(text) <= 1024


@contextmanager
def _published_events(llm: LLM, namespace: Namespace) -> Iterator[None]:
    """Publish the events of the prefix cache, if requested, until the server has ended."""
    if namespace.kv_events is None:
        if namespace.kv_events_replay is not None:
            raise UsageError("--kv-events-replay needs --kv-events")
        yield
        return
    from unspool.cluster.kv_events import Address, publish

    publisher = publish(llm, Address(namespace.kv_events, namespace.kv_events_replay))
    try:
        yield
    finally:
        llm.close()
        publisher.close()



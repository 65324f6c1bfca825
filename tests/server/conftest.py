"""Servers that end with their tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.harness import Live, make_llm
from unspool.llm import LLM
from unspool.server.config import ServerConfig


class Said(logging.Handler):
    """Keeps the lines of a log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the server logs meanwhile."""
    handler, logger = Said(), logging.getLogger("unspool.server")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.setLevel(before)


@pytest.fixture
def make_server() -> Iterator[Callable[..., Live]]:
    """make_server(llm=…, drain=…): servers that are stopped when the test ends."""
    servers: list[Live] = []

    def make(llm: LLM | None = None, **config: Any) -> Live:
        options = {"port": 0, "log_format": "off", "drain": 0.0} | config
        servers.append(Live(ServerConfig(**options), llm or make_llm()))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """One for a module's tests that need nothing special."""
    live = Live(ServerConfig(port=0, log_format="off", drain=0.0), make_llm())
    yield live
    live.wait_idle()
    live.stop()

"""What several tests use: the default model and tiny random ones, opened once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.random import SHAPES, random_checkpoint

# A shell that starts tests in the background makes them ignore Ctrl-C, which several tests send to themselves or to a
# child process.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test may fail because the machine is slow.
settings.register_profile("unspool", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unspool")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model", help="the default model's file, where it is not the one that was fetched")
    parser.addoption("--chromium", default="", help="the browser of tests/web, which run only where one is named")


@cache
def _tiny(shape: str, format: str) -> Checkpoint:
    return random_checkpoint(SHAPES[shape], format=format)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Checkpoint]:
    """tiny("tiny-qwen3", "q4_1"): a small random model."""
    return lambda shape="tiny", format="f32": _tiny(shape, format)


@pytest.fixture(scope="session")
def smollm2_path(request: pytest.FixtureRequest) -> Path:
    """The default model's file, fetched if this machine has never had it."""
    from unspool.weights.store import resolve

    return resolve(request.config.getoption("--model") or "smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Checkpoint:
    return open_checkpoint(smollm2_path)

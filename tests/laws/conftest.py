"""Fixtures of the laws."""

from __future__ import annotations

import pytest

from tests.laws.crowd import Crowd, random_job


@pytest.fixture
def make_crowd() -> type[Crowd]:
    return Crowd


@pytest.fixture
def make_job() -> object:
    return random_job

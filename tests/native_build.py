"""A pytest plugin: `python -m pytest -p tests.native_build --native FILE` tests another build of the extension."""

from __future__ import annotations

import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native", required=True, type=Path, help="the extension to test instead of the installed one")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any test file can import the installed one."""
    import unspool

    name, path = "unspool._native", str(early_config.known_args_namespace.native)
    assert name not in sys.modules
    module = module_from_spec(ModuleSpec(name, ExtensionFileLoader(name, path), origin=path))
    module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
    sys.modules[name] = module
    unspool._native = module  # type: ignore[attr-defined]

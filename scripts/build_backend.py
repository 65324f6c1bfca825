"""The build backend: scikit-build-core's, which finds the inspector's page built when it makes a wheel or an sdist.

An sdist carries the built page, so installing from one needs no Node. An editable install does without: `make web`
builds the page there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from scikit_build_core import build as _core
from scikit_build_core.build import (  # noqa: F401  frontends look for them here
    build_editable,
    get_requires_for_build_editable,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))
import web


def _requirements(known: list[str]) -> list[str]:
    needs_node = (web.WEB / "package.json").exists() and web.find_node() is None
    return [*known, *([web.PACKAGE] if needs_node else [])]


def _build_page() -> None:
    if (web.WEB / "package.json").exists():  # an sdist has the built page and not its sources
        web.build()


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _requirements(_core.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return _requirements(_core.get_requires_for_build_sdist(config_settings))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    _build_page()
    return _core.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    _build_page()
    return _core.build_sdist(sdist_directory, config_settings)

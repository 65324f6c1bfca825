"""Pages, each one file without anything fetched from elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def docs_page() -> str:
    """The reader of /openapi.json."""
    return (Path(__file__).parent / "docs.html").read_text(encoding="utf-8")

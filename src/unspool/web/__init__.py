"""Pages: the inspector, which `make web` builds into assets/, and the reader of /openapi.json."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ASSETS = HERE / "assets"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
HOW_TO_BUILD = "the inspector's page is not built here; `make web` in a clone of the repository builds it"


@cache
def docs_page() -> str:
    """The reader of /openapi.json."""
    return (HERE / "docs.html").read_text(encoding="utf-8")


@cache
def docs_policy() -> str:
    """What that page may do: run its own script and style, which are named by their hashes, and ask this server."""
    sources = [f"{kind}-src {_hash_of(tag)}" for kind, tag in (("script", "script"), ("style", "style"))]
    return f"default-src 'none'; {'; '.join(sources)}; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"


def _hash_of(tag: str) -> str:
    [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", docs_page(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def is_built() -> bool:
    return (ASSETS / "index.html").exists()


def inspector_page() -> tuple[str, bool]:
    """The page at /, and whether it is the inspector: without it, a page that says what is missing."""
    if is_built():
        return (ASSETS / "index.html").read_text(encoding="utf-8"), True
    missing = HOW_TO_BUILD.replace("`make web`", "<code>make web</code>")
    body = f'<h1>unspool</h1><p>{missing}.</p><p>The API is at /v1; <a href="/docs">/docs</a> describes it.</p>'
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>unspool</title>{body}</html>', False


def find_asset(name: str) -> tuple[bytes, str, str] | None:
    """(content, media type, entity tag) of a file of the page. Only names without a path are looked for."""
    media_type = MEDIA_TYPES.get(Path(name).suffix)
    if media_type is None or not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", name):
        return None
    try:
        data = (ASSETS / name).read_bytes()
    except OSError:
        return None
    return data, media_type, f'"{hashlib.sha256(data).hexdigest()[:32]}"'

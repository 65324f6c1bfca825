"""The inspector's sources and what is served of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from unspool import web

SOURCES = Path(__file__).parents[2] / "web"


def test_the_lock_file_names_no_registry_and_has_a_hash_of_every_package() -> None:
    packages = json.loads((SOURCES / "package-lock.json").read_text("utf-8"))["packages"]
    assert len(packages) > 10
    for name, package in packages.items():
        assert "resolved" not in package, name
        assert name == "" or package["integrity"].startswith("sha512-"), name
    assert "registry" not in (SOURCES / ".npmrc").read_text("utf-8")


def test_no_template_has_inline_styles_or_handlers() -> None:
    """The page's policy forbids them; styles are set as properties."""
    for path in sorted((SOURCES / "src").rglob("*")):
        if path.suffix in (".ts", ".html"):
            text = path.read_text("utf-8")
            assert not re.search(r'[\s"]style="', text), path
            assert "innerHTML" not in text, path
            assert "unsafeHTML" not in text, path
            assert not re.search(r"\son\w+=", text), path


def test_nothing_but_named_files_of_the_page_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inspector.js").write_text("1")
    (tmp_path / "secret").write_text("2")
    (tmp_path.parent / "outside.js").write_text("3")
    monkeypatch.setattr(web, "ASSETS", tmp_path)
    found = web.find_asset("inspector.js")
    assert found is not None
    assert found[:2] == (b"1", "text/javascript; charset=utf-8")
    for name in ("secret", "../outside.js", "%2e%2e/outside.js", ".", "", "/etc/passwd", "absent.js", "x\0.js"):
        assert web.find_asset(name) is None, name


def test_without_built_assets_the_page_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "ASSETS", tmp_path)
    page, is_built = web.inspector_page()
    assert not is_built
    assert "make web" in page
    (tmp_path / "index.html").write_text("<p>page</p>")
    assert web.inspector_page() == ("<p>page</p>", True)

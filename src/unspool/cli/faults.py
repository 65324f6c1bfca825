"""A line about a model whose files have serious faults, when it is loaded.

The checks of `unspool doctor` that decode no weights run when a model is loaded for the first time. Their findings are
stored next to the downloaded models until the model's files change, so that later starts read only a few bytes.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from unspool.digest import sha256
from unspool.errors import UnspoolError
from unspool.version import VERSION
from unspool.weights.store import cache_dir

if TYPE_CHECKING:
    from unspool.llm import LLM
    from unspool.models.checkpoint import Checkpoint

MOST_KEPT = 64  # models


def warn_of_faults(llm: LLM, name: str) -> None:
    """One line on stderr if the model's files have errors."""
    key = _key(llm.checkpoint)
    if key is None:
        return
    kept = _read()
    if key not in kept:
        kept = {**dict(list(kept.items())[1 - MOST_KEPT :]), key: _find(llm)}
        _write(kept)
    titles = kept[key]
    if titles:
        from unspool.cli.terminal import harmless, warn

        more = f" (and {len(titles) - 1} more)" if len(titles) > 1 else ""
        warn(harmless(f"{titles[0]}{more}; `unspool doctor {name}` says what to do"))


def _key(checkpoint: Checkpoint) -> str | None:
    """A key of the model's files in their current state and of their overrides; None: it has no files."""
    path = checkpoint.path
    if path.is_dir():
        files = sorted([*path.glob("*.json"), *path.glob("*.jinja")])
    else:
        files = [path, path.with_suffix(".generation_config.json")]
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    settings = (checkpoint.config.identity, checkpoint.eos_ids, checkpoint.chat_template)
    return sha256(repr((VERSION, str(path.absolute()), states, settings)).encode()).hexdigest()[:32] if states else None


def _find(llm: LLM) -> list[str]:
    from unspool.doctor import open_subject, serious_findings

    with suppress(UnspoolError):  # a chat reports it
        return [finding.title for finding in serious_findings(open_subject(llm.checkpoint, tokenizer=llm.tokenizer))]
    return []


def _path() -> Path:
    return cache_dir() / "findings.json"


def _read() -> dict[str, list[str]]:
    """The findings of each model; an invalid file counts as empty."""
    try:
        kept = json.loads(_path().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(kept, dict) and all(isinstance(titles, list) for titles in kept.values())
    return kept if is_ours else {}


def _write(kept: dict[str, list[str]]) -> None:
    """Write atomically. If the file cannot be written, the checks run each time."""
    import os

    temporary = _path().with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(kept), "utf-8")
        temporary.replace(_path())

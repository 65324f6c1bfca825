"""From flags to a loaded model, with a progress bar for downloading and loading."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.cli.faults import warn_of_faults
from unspool.cli.flags import engine_options
from unspool.cli.status import Status, bar, wanted
from unspool.cli.terminal import ProgressBar, human_bytes
from unspool.lazy import limit_blas_threads
from unspool.records import record

if TYPE_CHECKING:
    from unspool.llm import LLM
    from unspool.models.checkpoint import Checkpoint

PROGRESS_BYTES = 1 << 29  # of weights; fewer are packed while the prompt is prepared, which is impossible with progress


def locate(model: str) -> Path:
    """The model's path; a missing model is downloaded."""
    from unspool.weights.store import resolve

    progress = ProgressBar()
    try:
        return resolve(model, progress=progress)
    finally:
        progress.close()


def load(namespace: argparse.Namespace) -> tuple[LLM, float]:
    """The model, and the seconds that it took to open."""
    options = all_options(namespace)
    with _no_collections():
        if options.get("device") != "reference":  # the only backend that multiplies with numpy
            limit_blas_threads()
        from unspool.llm import LLM

        path = None if namespace.random is not None else locate(namespace.model)
        progress = LoadProgress(namespace.random or Path(namespace.model).name)
        with Status(progress.describe, wanted(namespace)) as status:
            start = time.perf_counter()
            checkpoint = _opened(namespace, path)
            progress.total = sum(weight.nbytes for weight in checkpoint.weights.values()) if status.is_wanted else 0
            on_progress = progress.take if progress.total > PROGRESS_BYTES else None
            llm = LLM(checkpoint, on_progress=on_progress, **options)
            seconds = time.perf_counter() - start
        warn_of_faults(llm, namespace.model)
    return llm, seconds


@record
class LoadProgress:
    """The progress of loading a model, if it is known."""

    name: str
    total: int = 0  # bytes of weights
    share: float = 0.0

    def take(self, share: float) -> None:
        self.share = share

    def describe(self) -> str:
        if not self.share:
            return f"loading {self.name}"
        done, total = human_bytes(self.share * self.total), human_bytes(self.total)
        return bar(f"loading {self.name}", self.share, f"{done} of {total}")


def _opened(namespace: argparse.Namespace, path: Path | None) -> Checkpoint:
    if path is None:
        from unspool.models.random import stand_in

        return stand_in(namespace.random)
    from unspool.models.checkpoint import open_checkpoint

    return open_checkpoint(path)


def all_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """EngineConfig's fields: from the command line, else from the model's entry in the configuration."""
    from unspool.options import configured_options

    given = engine_options(namespace)
    return given if namespace.random is not None else {**configured_options(namespace.model), **given}


def source_of(namespace: argparse.Namespace) -> Path | Checkpoint:
    """The named model, or one of random weights."""
    if namespace.random is None:
        return locate(namespace.model)
    from unspool.models.random import stand_in

    return stand_in(namespace.random)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turn off garbage collection while loading, which makes many objects and no garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

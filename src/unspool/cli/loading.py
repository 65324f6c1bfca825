"""From flags to a model that is ready, with a progress bar if it has to be fetched first."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unspool.cli.flags import engine_options
from unspool.cli.terminal import ProgressBar
from unspool.lazy import limit_blas_threads

if TYPE_CHECKING:
    from unspool.llm import LLM
    from unspool.models.checkpoint import Checkpoint


def locate(model: str) -> Path:
    """The model's path; what is not here is fetched."""
    from unspool.weights.store import resolve

    progress = ProgressBar()
    try:
        return resolve(model, progress=progress)
    finally:
        progress.close()


def load(namespace: argparse.Namespace) -> tuple[LLM, float]:
    """The model and how many seconds it took to open."""
    options = engine_options(namespace)
    with _no_collections():
        if options.get("device") != "reference":  # the only body that multiplies with numpy
            limit_blas_threads()
        from unspool.llm import LLM

        model = source_of(namespace)
        start = time.perf_counter()
        return LLM(model, **options), time.perf_counter() - start


def source_of(namespace: argparse.Namespace) -> Path | Checkpoint:
    """The model that was named, or one of random weights."""
    if namespace.random is None:
        return locate(namespace.model)
    from unspool.models.random import stand_in

    return stand_in(namespace.random)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Loading makes many objects and no garbage: looking for it takes time and finds nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

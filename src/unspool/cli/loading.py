"""From flags to a model that is ready, with a progress bar if it has to be fetched first."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unspool.cli.flags import engine_options
from unspool.cli.terminal import ProgressBar

if TYPE_CHECKING:
    from unspool.llm import LLM
    from unspool.weights.checkpoint import Checkpoint

THREADS = "OPENBLAS_NUM_THREADS"


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
        if options.get("device") != "reference":
            _import_numpy_alone()
        from unspool.llm import LLM

        model = source_of(namespace)
        start = time.perf_counter()
        return LLM(model, **options), time.perf_counter() - start


def source_of(namespace: argparse.Namespace) -> Path | Checkpoint:
    """The model that was named, or one of random weights."""
    if namespace.random is None:
        return locate(namespace.model)
    from unspool.weights.random import stand_in

    return stand_in(namespace.random)


def _import_numpy_alone() -> None:
    """numpy's BLAS starts a thread for each further core as it is loaded, and that takes longer than the rest of numpy.
    Only the reference body multiplies with it. The setting is gone again before anyone else can inherit it."""
    if "numpy" in sys.modules or THREADS in os.environ:
        return
    os.environ[THREADS] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[THREADS]


@contextmanager
def _no_collections() -> Iterator[None]:
    """Loading makes many objects and no garbage: looking for it takes time and finds nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

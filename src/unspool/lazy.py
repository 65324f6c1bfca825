"""Modules that are imported when something of theirs is first asked for.

A plain answer on the CPU needs nothing of numpy, which takes 13 MB of memory and a quarter of the start: whoever only
might need it has it from here, and so have modules that are numpy through and through.

    from unspool.lazy import np
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_is_alone = False


class LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = getattr(_load(self.__name__), name)
        setattr(self, name, value)  # the next time it is simply there
        return value


def lazy(name: str) -> Any:
    return LazyModule(name)


def limit_blas_threads() -> None:
    """From now on numpy is imported without the threads of its BLAS: one for each further core, and starting them takes
    longer than the rest of numpy. For a program of ours that multiplies nothing with it."""
    global _is_alone
    _is_alone = True


def _load(name: str) -> ModuleType:
    """Import a module, whole or not at all: an extension module that was interrupted in the middle cannot be imported
    again. Ctrl-C is raised in the main thread, so the import runs in another."""
    if name not in sys.modules and threading.current_thread() is threading.main_thread():
        thread = threading.Thread(target=_try_import, args=(name,), name="unspool-import")
        thread.start()
        thread.join()
    return _import(name)


def _try_import(name: str) -> None:
    with contextlib.suppress(Exception):  # whoever asked imports it again, and gets the error
        _import(name)


def _import(name: str) -> ModuleType:
    if not _is_alone or "numpy" in sys.modules or _BLAS_THREADS in os.environ:
        return import_module(name)
    os.environ[_BLAS_THREADS] = "1"
    try:
        return import_module(name)
    finally:
        del os.environ[_BLAS_THREADS]  # before anyone else can inherit it


if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy("numpy")

__all__ = ["lazy", "limit_blas_threads", "np"]

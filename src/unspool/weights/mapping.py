"""A model's file in memory: its bytes are read where they lie, and given back when they have been copied elsewhere."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from unspool.errors import ModelError


class FileMap(mmap.mmap):
    """A file, memory-mapped for reading; `descriptor` reads from it without mapping anything."""

    descriptor = -1

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def map_file(path: Path) -> FileMap:
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # a named pipe would block for ever
                raise ModelError(f"{path} is not a regular file")
            if status.st_size == 0:
                raise ModelError(f"{path} is empty")
            mapping = FileMap(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapping.descriptor = os.dup(file.fileno())
            return mapping
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def mapping_of(data: np.ndarray) -> FileMap | None:
    """The mapped file that an array's bytes belong to, if they do."""
    base: Any = data
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, FileMap) else None


def origin_of(mapping: FileMap) -> int:
    """Where the file's first byte lies in memory."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def read_samples(data: np.ndarray, starts: Iterable[int], count: int) -> bytes:
    """`count` bytes from each of these places. What is mapped is read from the file: looking at a byte in memory brings
    sixteen pages with it, and a sample of every tensor nearly all of them."""
    mapping = mapping_of(data)
    if mapping is None:
        return b"".join([data[start : start + count].tobytes() for start in starts])
    first = data.ctypes.data - origin_of(mapping)
    read, descriptor = os.pread, mapping.descriptor
    return b"".join([read(descriptor, count, first + start) for start in starts])


def release(arrays: Iterable[np.ndarray]) -> None:
    """Give back the memory of mapped bytes, from the first array of each file to its last: they can be read again."""
    spans: dict[FileMap, tuple[int, int]] = {}
    for data in arrays:
        mapping = mapping_of(data)
        if mapping is not None:
            start = data.ctypes.data
            low, high = spans.get(mapping, (start, start))
            spans[mapping] = min(low, start), max(high, start + data.nbytes)
    for mapping, (low, high) in spans.items():
        first = (low - origin_of(mapping)) // mmap.PAGESIZE * mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, first, high - origin_of(mapping) - first)

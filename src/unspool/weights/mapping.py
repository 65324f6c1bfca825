"""A model's file in memory: its bytes are read in place, and released after they have been copied elsewhere."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unspool.errors import ModelError
from unspool.lazy import np


class FileMap(mmap.mmap):
    """A file, memory-mapped for reading; `descriptor` allows reads without mapping pages."""

    descriptor = -1
    path: Path
    reported: Any = None  # makes a fault in this mapping print the file's name; set if the extension is built

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
            mapping.path = path
            mapping.reported = _report_faults(mapping)
            return mapping
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _report_faults(mapping: FileMap) -> Any:
    try:
        from unspool._native import MappedFile
    except ImportError:
        return None
    return MappedFile(mapping, os.fsencode(mapping.path))


def mapping_of(data: Any) -> FileMap | None:
    """The mapped file that contains these bytes (a view's or an array's), or None."""
    while data is not None and not isinstance(data, FileMap):
        data = data.obj if isinstance(data, memoryview) else getattr(data, "base", None)
    return data


def require_whole(data: Any) -> None:
    """Refuse mapped bytes whose file has been truncated meanwhile: reading missing pages would end the process."""
    mapping = mapping_of(data)
    if mapping is not None:
        size = os.fstat(mapping.descriptor).st_size
        if size < len(mapping):
            raise ModelError(f"{mapping.path} was cut from {len(mapping):,} to {size:,} bytes while it was in use")


def address_of(data: Any) -> int:
    """The address of the first of these bytes."""
    try:
        from unspool._native import address_of as native
    except ImportError:
        return int(np.frombuffer(data, np.uint8).ctypes.data)
    address: int = native(data)
    return address


def span_of(mapping: FileMap | None) -> tuple[int, int]:
    """A mapped file's first address and the address after its last byte; zeros without a mapping."""
    if mapping is None:
        return 0, 0
    first = address_of(mapping)
    return first, first + len(mapping)


def read_samples(data: memoryview, starts: Iterable[int], count: int) -> bytes:
    """`count` bytes from each of these places. Mapped bytes are read from the file instead: touching one byte in memory
    loads sixteen pages, and a sample of every tensor would load nearly the whole file."""
    mapping = mapping_of(data)
    if mapping is None:
        return b"".join([data[start : start + count] for start in starts])
    first = address_of(data) - address_of(mapping)
    read, descriptor = os.pread, mapping.descriptor
    return b"".join([read(descriptor, count, first + start) for start in starts])


def release(parts: Iterable[memoryview]) -> None:
    """Release the memory of mapped bytes, in each file from its first part to its last. They can be read again."""
    spans: dict[FileMap, tuple[int, int]] = {}
    for data in parts:
        mapping = mapping_of(data)
        if mapping is not None:
            start = address_of(data)
            low, high = spans.get(mapping, (start, start))
            spans[mapping] = min(low, start), max(high, start + data.nbytes)
    for mapping, (low, high) in spans.items():
        origin = address_of(mapping)
        first = (low - origin) // mmap.PAGESIZE * mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, first, high - origin - first)

"""The strings of a vocabulary, read directly from the mapped file.

As Python strings 100,000 tokens and merges take ten megabytes and a fifth of a second, and a first answer needs a few
hundred of them. Without the native extension, a list is used instead.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload


class Texts(Sequence[str]):
    """A sequence of strings, each created on demand. `native` also finds them by their text."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def __len__(self) -> int:
        return len(self.native)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self.native[place] for place in range(*index.indices(len(self)))]
        text: str = self.native[index + len(self) if index < 0 else index]
        return text

    def __iter__(self) -> Iterator[str]:
        return map(self.native.__getitem__, range(len(self)))


class TextIds(Mapping[str, int]):
    """text -> index; empty texts have none. Of equal texts the first is used."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        texts.native.index()

    def __getitem__(self, text: str) -> int:
        place: int = self._texts.native.find(text)
        if place < 0:
            raise KeyError(text)
        return place

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self._texts.native.find(text) >= 0

    def __iter__(self) -> Iterator[str]:
        return (text for text in self._texts if text)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def read_texts(buffer: Any, position: int, count: int) -> tuple[Texts, int] | None:
    """`count` strings in GGUF's layout, and where they end. None: there is no extension, or some are missing or not
    UTF-8, for which the Python reader gives a better error."""
    try:
        from unspool._native import Strings
    except ImportError:
        return None
    strings = Strings(buffer, position, count)
    return (Texts(strings), strings.end) if len(strings) == count else None


def as_texts(texts: Sequence[str]) -> Texts | None:
    """Any strings as Texts; None without the extension."""
    if isinstance(texts, Texts):
        return texts
    encoded = [text.encode("utf-8") for text in texts]
    buffer = b"".join([part for text in encoded for part in (struct.pack("<Q", len(text)), text)])
    found = read_texts(buffer or bytes(8), 0, len(encoded))
    return found and found[0]

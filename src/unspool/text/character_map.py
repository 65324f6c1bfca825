"""SentencePiece's character map: replacements of characters or sequences before a text is split into tokens.

A map is a trie of bytes in an array of 32-bit units (a double array: the unit of a child is its parent's offset XOR the
byte), and after it the replacements, each ended by a zero byte. The longest sequence that begins at a position is
replaced.
"""

from __future__ import annotations

import re
import struct
from array import array
from functools import cached_property

_LABEL, _HAS_LEAF, _SHIFTED, _IS_LEAF = 0x800000FF, 1 << 8, 1 << 9, 1 << 31
_MOST_KNOWN = 65_536
LONGEST_REPLACEMENT = 256  # bytes; the longest of Unicode's has 33


class CharacterMap:
    """`blob` is `precompiled_charsmap`; a ValueError says what is wrong with it."""

    def __init__(self, blob: bytes) -> None:
        if len(blob) < 4:
            raise ValueError(f"it has {len(blob)} bytes")
        (size,) = struct.unpack_from("<I", blob)
        if size % 4 or not 4 <= size < len(blob) - 3:
            raise ValueError(f"its trie has {size:,} bytes of {len(blob):,}")
        self._units = array("I")
        self._units.frombytes(blob[4 : 4 + size])
        self._replacements = blob[4 + size :]
        self._known: dict[str, str] = {}  # characters that begin no longer sequence
        if b"  " in self._replacements:
            raise ValueError("a replacement has two spaces in a row")

    def replace(self, text: str) -> str:
        """The text with all replacements made."""
        output, at = [], 0
        while at < len(text):
            unchanged = self._unchanged.match(text, at)
            if unchanged is not None:
                output.append(unchanged[0])
                at = unchanged.end()
                continue
            character = text[at]
            known, length = self._known.get(character), 1
            if known is None:
                known, length = self._longest(text, at)
            output.append(known)
            at += length
        return "".join(output)

    @cached_property
    def _unchanged(self) -> re.Pattern[str]:
        """A run of unchanged ASCII. Its last character needs ASCII after it, because a combining mark could follow."""
        ascii_characters = [chr(code) for code in range(128)]
        kept = [
            first
            for first in ascii_characters
            if self._longest(first, 0)[0] == first
            and all(self._longest(first + second, 0)[1] == 1 for second in ascii_characters)
        ]
        return re.compile(f"[{re.escape(''.join(kept))}]+(?![^\\x00-\\x7f])" if kept else "(?!)")

    def _longest(self, text: str, at: int) -> tuple[str, int]:
        """The replacement of the longest sequence at a position, and the sequence's length in characters."""
        units, unit = self._units, 0
        node = self._offset(0)
        found: tuple[int, int] | None = None
        for length, character in enumerate(text[at : at + LONGEST_REPLACEMENT], 1):
            for byte in character.encode("utf-8"):
                node ^= byte
                unit = units[node] if node < len(units) else _IS_LEAF
                if unit & _LABEL != byte:
                    return self._result(text, at, found, is_final=length == 1)
                node ^= self._offset(node)
            if unit & _HAS_LEAF and node < len(units):
                found = units[node] & (_IS_LEAF - 1), length
            if length == 1 and self._is_end(node):
                return self._result(text, at, found, is_final=True)
        return self._result(text, at, found)

    def _offset(self, node: int) -> int:
        unit = self._units[node]
        return unit >> 10 << 8 if unit & _SHIFTED else unit >> 10

    def _is_end(self, node: int) -> bool:
        """Whether no longer sequence exists."""
        units = self._units
        return not any(node ^ byte < len(units) and units[node ^ byte] & _LABEL == byte for byte in range(1, 256))

    def _result(self, text: str, at: int, found: tuple[int, int] | None, is_final: bool = False) -> tuple[str, int]:
        """`is_final`: whether the first character decides alone."""
        if found is None:
            replacement, length = text[at], 1
        else:
            place, length = found
            end = self._replacements.find(b"\0", place, place + LONGEST_REPLACEMENT)
            if end < 0:
                raise ValueError(f"the replacement of {text[at : at + length]!r} has no end")
            replacement = self._replacements[place:end].decode("utf-8", "replace")
        if is_final and len(self._known) < _MOST_KNOWN:
            self._known[text[at]] = replacement
        return replacement, length

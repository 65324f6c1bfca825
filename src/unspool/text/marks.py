"""Finding a vocabulary's marks (`<|im_end|>`, `<s>`, added words) in text, before anything else is tokenized."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_SPACES = re.compile(r"\s*")


class MarkSplitter:
    """Splits text at its marks: yields strings (text between) and ids (marks), leftmost first, longest first.

    `strips_after` has the marks that consume the white space after them.
    """

    def __init__(self, ids: Mapping[str, int], strips_after: frozenset[int] = frozenset()) -> None:
        self._ids = {text: token_id for text, token_id in ids.items() if text}
        self._texts = {token_id: text for text, token_id in self._ids.items()}
        self._strips_after = strips_after
        # A vocabulary may have thousands of marks: search only where one could begin, then only lengths that occur.
        self._lengths: dict[str, list[int]] = {}
        for text in self._ids:
            self._lengths.setdefault(text[:2], []).append(len(text))
        for start, lengths in self._lengths.items():
            self._lengths[start] = sorted(set(lengths), reverse=True)
        starts = "|".join(re.escape(start) for start in sorted(self._lengths, key=len, reverse=True))
        self._start = re.compile(f"(?=({starts}))") if starts else None

    def text_of(self, token_id: int) -> str:
        """The text of a mark."""
        return self._texts[token_id]

    def split(self, text: str) -> Iterator[str | int]:
        begin = 0
        for position, length in self._found(text):
            if position > begin:
                yield text[begin:position]
            token_id = self._ids[text[position : position + length]]
            yield token_id
            begin = position + length
            if token_id in self._strips_after:
                begin = _SPACES.match(text, begin).end()  # type: ignore[union-attr]  # it matches nothing, too
        if begin < len(text):
            yield text[begin:]

    def _found(self, text: str) -> Iterator[tuple[int, int]]:
        if self._start is None:
            return
        begin = 0
        while (match := self._start.search(text, begin)) is not None:
            position = match.start()
            length = self._longest_at(text, position)
            if length:
                yield position, length
            begin = position + max(length, 1)

    def _longest_at(self, text: str, position: int) -> int:
        longest = 0
        # A one-character mark is filed under itself, longer ones under their first two characters.
        for start in (text[position : position + 2], text[position : position + 1]):
            for length in self._lengths.get(start, ()):
                if length > longest and text[position : position + length] in self._ids:
                    longest = length
                    break
        return longest

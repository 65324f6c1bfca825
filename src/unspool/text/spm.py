"""SentencePiece merging: from characters up, always the neighbouring pair whose union has the best score.

    ▁ t h e   →   ▁t h e   →   ▁t he   →   ▁the          a character no token has   →   <0xE2> <0x98> <0x83>

Among equal scores the leftmost pair is merged first. Merge tables (one rank per pair) cannot express that, and real
vocabularies have equal scores, so there is no merge table. This also costs nothing to build, while deriving the half
million pairs of a 262,144-token vocabulary takes more than a second. The class here is the specification; the native
backend gives the same ids, and is used if the extension is built.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from unspool.text.texts import Texts
from unspool.text.vocabulary import SPACE_MARK

_CACHED_WORDS = 65_536  # words repeat; the limit bounds the memory of a long-running server
_CACHED_LENGTH = 64


class Pieces(Protocol):
    def encode(self, text: str) -> list[int]: ...


def make_pieces(
    tokens: Sequence[str],
    ids: Mapping[str, int],
    scores: Sequence[float],
    marks: Sequence[int],
    byte_ids: Sequence[int] | None,
    unk: int,
) -> Pieces:
    """`marks`: the tokens that text never becomes. The native backend if it is built, else the specification."""
    if isinstance(tokens, Texts):
        from unspool._native import ScoredPieces

        if not isinstance(scores, memoryview) or scores.format != "f":
            scores = memoryview(array("f", scores))
        pieces: Pieces = ScoredPieces(tokens.native, scores.cast("B"), marks, byte_ids, unk)
        return pieces
    mergeable = dict(ids)
    for index in marks:
        mergeable.pop(tokens[index], None)
    return SentencePieceModel(mergeable, scores, byte_ids, unk)


class SentencePieceModel:
    """Turns text (spaces already written as "▁") into ids. `ids` holds the mergeable tokens only, so that the text
    of a control token stays text; `byte_ids` the fallback for characters without a token (byte -> id)."""

    def __init__(
        self, ids: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int] | None, unk: int
    ) -> None:
        self._ids = ids
        self._scores = scores
        self._byte_ids = byte_ids
        self._unk = unk
        self._boundary = _word_boundary(ids)
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids = self._encode(text)
        return join_unknown(ids, self._unk) if self._byte_ids is None else ids

    def _encode(self, text: str) -> list[int]:
        output: list[int] = []
        words = self._words
        for word in self._boundary.split(text):
            known = words.get(word)
            if known is None:
                known = self._encode_word(word) if word else []
                if len(word) <= _CACHED_LENGTH:
                    if len(words) >= _CACHED_WORDS:
                        words.clear()
                    words[word] = known
            output += known
        return output

    def _encode_word(self, word: str) -> list[int]:
        if (whole := self._ids.get(word)) is not None and len(word) == 1:
            return [whole]
        output: list[int] = []
        for piece in self._merge(word):
            token = self._ids.get(piece)
            if token is not None:
                output.append(token)
            elif self._byte_ids is None:
                output.append(self._unk)
            else:
                output += [self._byte_ids[byte] for byte in piece.encode("utf-8")]
        return output

    def _merge(self, word: str) -> list[str]:
        """A doubly linked list of pieces and a heap of candidate pairs; a stale pair is recognized by its length."""
        ids, scores = self._ids, self._scores
        pieces: list[str] = list(word)
        last = len(pieces) - 1
        before = list(range(-1, last))
        after = list(range(1, last + 2))
        heap = []
        for left in range(last):
            token = ids.get(pieces[left] + pieces[left + 1])
            if token is not None:
                heap.append((-scores[token], left, left + 1, 2))
        heapify(heap)
        while heap:
            _, left, right, length = heappop(heap)
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != length:
                continue
            pieces[left] += pieces[right]
            pieces[right] = ""
            after[left] = after[right]
            if after[right] <= last:
                before[after[right]] = left
            for a, b in ((before[left], left), (left, after[left])):
                if a >= 0 and b <= last:
                    token = ids.get(pieces[a] + pieces[b])
                    if token is not None:
                        heappush(heap, (-scores[token], a, b, len(pieces[a]) + len(pieces[b])))
        return [piece for piece in pieces if piece]


def join_unknown(ids: Sequence[int], unk: int) -> list[int]:
    """Joins neighbouring unknown tokens into one."""
    return [index for place, index in enumerate(ids) if index != unk or place == 0 or ids[place - 1] != unk]


def _word_boundary(ids: Mapping[str, int]) -> re.Pattern[str]:
    """Where text may be split without changing any id: before a "▁" that no token has after that character.

    Merging inside one word never depends on another, so words can be merged alone and cached. Nearly every vocabulary
    has "▁" only at the start of tokens or in runs; Gemma's `>▁</` is an exception.
    """
    joined = "\0".join(ids)
    while SPACE_MARK * 2 in joined:
        joined = joined.replace(SPACE_MARK * 2, SPACE_MARK)
    joined_after = {part[-1:] for part in joined.split(SPACE_MARK)[:-1]} - {"\0", ""}
    inside = "".join(map(re.escape, sorted(joined_after | {SPACE_MARK})))
    # A token that contains the separator itself could hide such a place; then nothing is split.
    if joined.count("\0") != max(len(ids) - 1, 0):
        return re.compile(r"(?!)")
    return re.compile(rf"(?<![{inside}])(?={SPACE_MARK})")

"""SentencePiece's unigram model: of all ways to split a text into tokens, the one with the largest sum of scores.

A character without a token scores ten less than the lowest score, so it is used only if nothing else fits. The class
here is the specification; the native backend gives the same ids, and is used if the extension is built.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Collection, Mapping, Sequence

from unspool.text.spm import Pieces, join_unknown
from unspool.text.texts import Texts

_PENALTY = 10.0
MAX_PIECE = 256  # bytes: the longest piece tried at each position


def make_unigram(
    tokens: Sequence[str],
    ids: Mapping[str, int],
    scores: Sequence[float],
    marks: Collection[int],
    added: Collection[int],
    byte_ids: Sequence[int] | None,
    unk: int,
) -> Pieces:
    """`marks`: the tokens that text never becomes; `added`: those that are used wherever their text occurs."""
    values = array("f", scores)
    for index in (*marks, *added):
        values[index] = math.nan
    worst = min((score for score in values if not math.isnan(score)), default=0.0)
    for index in added:
        values[index] = 0.0  # the best score: others are logarithms of probabilities
    unknown_score = _float32(worst - _PENALTY)
    if isinstance(tokens, Texts):
        from unspool._native import UnigramPieces

        pieces: Pieces = UnigramPieces(tokens.native, values, byte_ids, unk, unknown_score)
        return pieces
    usable = {text: index for text, index in ids.items() if not math.isnan(values[index])}
    return UnigramModel(usable, values, byte_ids, unk, unknown_score)


class UnigramModel:
    """Turns text (spaces already written as "▁") into ids. `ids` holds the tokens that text may become."""

    def __init__(
        self,
        ids: Mapping[str, int],
        scores: Sequence[float],
        byte_ids: Sequence[int] | None,
        unk: int,
        unknown_score: float,
    ) -> None:
        self._ids = ids
        self._scores = scores
        self._byte_ids = byte_ids
        self._unk = unk
        self._unknown_score = unknown_score
        self._longest = max(map(len, ids), default=0)

    def encode(self, text: str) -> list[int]:
        output: list[int] = []
        for piece, index in self._best(text):
            if index is not None:
                output.append(index)
            elif self._byte_ids is None:
                output.append(self._unk)
            else:
                output += [self._byte_ids[byte] for byte in piece.encode("utf-8")]
        return join_unknown(output, self._unk) if self._byte_ids is None else output

    def _best(self, text: str) -> list[tuple[str, int | None]]:
        """The pieces of the best split; None for a character without a token.

        Sums are float32, so that ties and near ties are resolved as in SentencePiece.
        """
        scores = array("f", bytes(4 * (len(text) + 1)))  # of the best way to each place
        last: list[tuple[int, int | None] | None] = [None] * (len(text) + 1)  # where its last piece begins, and which
        for begin in range(len(text)):
            for end in range(begin + 1, min(len(text), begin + self._longest) + 1):
                index = self._ids.get(text[begin:end])
                if index is None:
                    continue
                score = _float32(self._scores[index] + scores[begin])
                if last[end] is None or score > scores[end]:
                    scores[end], last[end] = score, (begin, index)
            score = _float32(self._unknown_score + scores[begin])
            after = begin + 1
            if text[begin] not in self._ids and (last[after] is None or score > scores[after]):
                scores[after], last[after] = score, (begin, None)
        pieces: list[tuple[str, int | None]] = []
        end = len(text)
        while end > 0:
            step = last[end]
            assert step is not None, "every place can be reached"
            pieces.append((text[step[0] : end], step[1]))
            end = step[0]
        return pieces[::-1]


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded

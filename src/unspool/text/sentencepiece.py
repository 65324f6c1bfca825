"""SentencePiece as an encoder: a text is normalized, then split into pieces, by merging (BPE) or the best sum
(unigram).

" Hello  wörld"  ─ character map, extra spaces, a space in front ─►  "▁Hello▁wörld"  ─►  ▁Hello ▁w ör ld
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from unspool.errors import ModelError
from unspool.records import record
from unspool.text.character_map import CharacterMap
from unspool.text.marks import MarkSplitter
from unspool.text.sentencepiece_file import BPE
from unspool.text.spm import Pieces, make_pieces
from unspool.text.texts import TextIds, as_texts
from unspool.text.token_types import ADDED, BYTE, CONTROL, UNKNOWN, UNUSED
from unspool.text.unigram import MAX_PIECE, make_unigram
from unspool.text.vocabulary import SPACE_MARK


@record(frozen=True)
class Normalizer:
    """Normalizes a text. `space_everywhere`: each part between marks gets a space, not only the first."""

    characters: CharacterMap | None = None
    adds_space: bool = True
    removes_extra_spaces: bool = False
    space_is_suffix: bool = False
    space_everywhere: bool = True

    def normalize(self, text: str, added: MarkSplitter, is_first: bool) -> str:
        if not text:
            return ""
        if self.characters is not None:
            text = "".join(self._replaced(text, added))
        if self.removes_extra_spaces:
            if text and not text.strip(" "):
                return ""
            text = re.sub(" +", " ", text.lstrip(" "))
        text = text.replace(" ", SPACE_MARK)
        adds_space = self.adds_space and (is_first or self.space_everywhere)
        if adds_space and not self.space_is_suffix:
            text = SPACE_MARK + text
        if self.removes_extra_spaces:
            text = text.rstrip(SPACE_MARK)
        if adds_space and self.space_is_suffix:
            text += SPACE_MARK
        return text

    def _replaced(self, text: str, added: MarkSplitter) -> list[str]:
        """The normalized text; added tokens in it are unchanged."""
        assert self.characters is not None
        parts = []
        for part in added.split(text):
            if isinstance(part, str):
                parts.append(self.characters.replace(part))
            else:
                parts.append(added.text_of(part))
        return parts


@record(frozen=True)
class PieceTable:
    """A vocabulary with scores: texts by id, ids by text, ids by type, the ids of bytes (all 256 or none)."""

    tokens: Sequence[str]
    ids: Mapping[str, int]
    scores: Sequence[float]
    by_type: Mapping[int, Sequence[int]]
    byte_ids: Sequence[int] | None
    unknown: int

    def of_types(self, *types: int) -> list[int]:
        return [index for kind in types for index in self.by_type.get(kind, ())]

    def texts_of(self, *types: int) -> dict[str, int]:
        return {self.tokens[index]: index for index in self.of_types(*types)}

    def make_model(self, kind: int) -> Pieces:
        marks = self.of_types(UNKNOWN, CONTROL, UNUSED, BYTE)
        added = self.of_types(ADDED)
        found = as_texts(self.tokens)
        tokens, ids = (self.tokens, self.ids) if found is None else (found, TextIds(found))
        if kind == BPE:
            return make_pieces(tokens, ids, self.scores, [*marks, *added], self.byte_ids, self.unknown)
        for index, text in enumerate(self.tokens):
            if len(text.encode()) > MAX_PIECE and index not in marks:
                raise ModelError(f"token {index:,} has more than {MAX_PIECE} bytes: {text!r:.40}")
        return make_unigram(tokens, ids, self.scores, marks, added, self.byte_ids, self.unknown)


class PieceEncoder:
    """`splitter(parse_special)` finds the marks, which no normalization and no merging touches."""

    def __init__(
        self, table: PieceTable, kind: int, normalizer: Normalizer, splitter: Callable[[bool], MarkSplitter]
    ) -> None:
        self._model = table.make_model(kind)
        self._added = MarkSplitter(table.texts_of(ADDED))
        self._splits_added = kind == BPE  # for the other kind, their scores ensure that they are used
        self._normalizer = normalizer
        self._splitter = splitter

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        is_first = True
        for part in self._splitter(parse_special).split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode(self._normalizer.normalize(part, self._added, is_first))
            is_first = False
        return ids

    def _encode(self, text: str) -> list[int]:
        if not self._splits_added:
            return self._model.encode(text)
        ids: list[int] = []
        for part in self._added.split(text):
            ids += [part] if isinstance(part, int) else self._model.encode(part)
        return ids

"""Byte-pair merging that starts from characters and not from bytes, over a whole text: Gemma 4 and similar models.

Spaces are written as "▁" and the text is not split before merging, so a merge may cross a space if the merge table has
such a pair. A character that no token stands for becomes the tokens of its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unspool.errors import ModelError
from unspool.text import library
from unspool.text.byte_level import MERGES, merge_fault
from unspool.text.spm import Pieces
from unspool.text.texts import as_texts


def make_character_pairs(
    tokens: Sequence[str], ids: Mapping[str, int], merges: Sequence[str], byte_ids: Sequence[int], unk: int
) -> Pieces:
    """`byte_ids`: byte -> id, all 256. The native backend if it is built, else the library."""
    found = as_texts(tokens)
    if found is None:
        return LibraryCharacters(ids, merges, tokens[unk])
    return NativeCharacters(found.native, ids, merges, byte_ids)


class NativeCharacters:
    def __init__(self, tokens: Any, ids: Mapping[str, int], merges: Sequence[str], byte_ids: Sequence[int]) -> None:
        from unspool._native import BytePairs

        pairs = as_texts(merges)
        assert pairs is not None  # the tokens are native already
        self._pairs = BytePairs(tokens, pairs.native, whole_words=False, bytes=byte_ids)
        if self._pairs.fault >= 0:
            raise ModelError(merge_fault(ids, merges) or f"{MERGES}[{self._pairs.fault}]: not two tokens")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._pairs.encode([text])
        return ids


class LibraryCharacters:
    """The `tokenizers` library, which is what these models' own tokenizers run on: the specification."""

    def __init__(self, ids: Mapping[str, int], merges: Sequence[str], unk: str) -> None:
        import tokenizers
        from tokenizers import models

        try:
            pairs: Any = [tuple(merge.split(" ", 1)) for merge in merges]
            model = models.BPE(dict(ids), pairs, byte_fallback=True, unk_token=unk, fuse_unk=True)
        except Exception as error:  # the library's error has no position: find it here
            raise ModelError(merge_fault(ids, merges) or f"{MERGES}: {error}") from error
        self._library = tokenizers.Tokenizer(model)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = library.encode(self._library, text).ids
        return ids

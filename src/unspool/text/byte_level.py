"""Byte-level BPE: text is split into words by the model's rule, and the bytes of each word are merged, best pair first.

Merging is native. Splitting needs Unicode classes, which the `tokenizers` library has. Importing it takes longer than
computing a prompt, so ASCII text, where the classes are a few ranges, is split by Python's `re`. Without the compiled
extension, the library does both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from unspool.errors import ModelError, RequestError
from unspool.text import library
from unspool.text.pretokenizers import PreTokenizer, cut_ascii
from unspool.text.texts import as_texts
from unspool.text.vocabulary import missing_bytes

MERGES = "tokenizer.ggml.merges"


class Words(Protocol):
    """Merges text without marks."""

    missing: frozenset[int]  # bytes that no token stands for

    def encode(self, text: str) -> list[int]: ...


def make_words(tokens: Sequence[str], ids: Mapping[str, int], merges: Sequence[str], rule: PreTokenizer) -> Words:
    found = as_texts(tokens)
    return LibraryWords(ids, merges, rule) if found is None else NativeWords(found.native, ids, merges, rule)


class NativeWords:
    def __init__(self, tokens: Any, ids: Mapping[str, int], merges: Sequence[str], rule: PreTokenizer) -> None:
        from unspool._native import BytePairs

        pairs = as_texts(merges)
        assert pairs is not None  # the tokens are native already
        self._pairs = BytePairs(tokens, pairs.native, whole_words=rule.ignore_merges)
        if self._pairs.fault >= 0:
            raise ModelError(merge_fault(ids, merges) or f"{MERGES}[{self._pairs.fault}]: not two tokens")
        self._rule = rule
        self.missing = frozenset(self._pairs.missing)

    def encode(self, text: str) -> list[int]:
        words = cut_ascii(self._rule, text) if text.isascii() else None
        if words is None:
            words = library.cut(self._splitter, text)
        ids: list[int] = self._pairs.encode(words)
        return ids

    @cached_property
    def _splitter(self) -> Any:
        from tokenizers import pre_tokenizers

        return pre_tokenizers.Sequence(library_cuts(self._rule))


class LibraryWords:
    def __init__(self, ids: Mapping[str, int], merges: Sequence[str], rule: PreTokenizer) -> None:
        import tokenizers
        from tokenizers import models, pre_tokenizers

        self.missing = missing_bytes(ids)
        try:
            pairs: Any = [tuple(merge.split(" ", 1)) for merge in merges]
            model = models.BPE(dict(ids), pairs, ignore_merges=rule.ignore_merges)
        except Exception as error:  # the library's error has no position: find it here
            raise ModelError(merge_fault(ids, merges) or f"{MERGES}: {error}") from error
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._library = tokenizers.Tokenizer(model)
        self._library.pre_tokenizer = pre_tokenizers.Sequence([*library_cuts(rule), to_bytes])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = library.encode(self._library, text).ids
        return ids


def library_cuts(rule: PreTokenizer) -> list[Any]:
    import tokenizers
    from tokenizers import pre_tokenizers

    return [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rule.patterns]


def refuse_missing(missing: frozenset[int], text: str) -> None:
    absent = missing.intersection(text.encode("utf-8"))
    if absent:
        raise RequestError(f"this vocabulary has no token for the byte 0x{min(absent):02X} in {text!r:.40}", "prompt")


def merge_fault(ids: Mapping[str, int], merges: Sequence[str]) -> str | None:
    for index, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            return f"{MERGES}[{index}]: {merge!r} is not two tokens"
        for token in (left, right, left + right):
            if token not in ids:
                return f"{MERGES}[{index}]: {merge!r} needs the token {token!r}, which the vocabulary lacks"
    return None

"""The meaning of each token id: its stored text, its bytes, and whether it is a mark or text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Literal

from unspool.digest import sha256

Spelling = Literal["byte-level", "sentencepiece"]

SPACE_MARK = "▁"


@cache
def byte_characters() -> tuple[str, ...]:
    """GPT-2's alphabet: byte -> the printable character that stands for it in a byte-level vocabulary.

    Printable Latin-1 stands for itself; the other bytes, in order, take the characters from U+0100 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


@cache
def _byte_of_character() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


class Vocabulary:
    """Token ids and what they write.

    `special` ids are marks (end of turn, start of text, unknown): left out of an answer's text by default. `literal`
    ids write their stored text unchanged, and so does every special one. The rest are spelled `byte-level` (each
    character stands for a byte) or in `sentencepiece` style ("▁" stands for a space; `bytes_of` has the ids that stand
    for one raw byte).
    """

    def __init__(
        self,
        tokens: Sequence[str],
        spelling: Spelling,
        *,
        special: Iterable[int] = (),
        literal: Iterable[int] = (),
        bytes_of: Mapping[int, int] | None = None,
    ) -> None:
        self.tokens = tokens
        self.spelling = spelling
        self.special = frozenset(special)
        self.literal = frozenset(literal)
        self._byte_ids = dict(bytes_of or {})
        self._cache: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this id writes. Ids past the end (a padded embedding table has them) write nothing."""
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        if token_id >= len(self.tokens):
            return b""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._spell_out(token_id)
        return known

    def _spell_out(self, token_id: int) -> bytes:
        text = self.tokens[token_id]
        if token_id in self.special or token_id in self.literal:
            return text.encode("utf-8", "replace")
        if self.spelling == "byte-level":
            byte_of = _byte_of_character()
            try:
                return bytes([byte_of[character] for character in text])
            except KeyError:  # an added token whose file forgot to mark it: its text is not in the byte alphabet
                return text.encode("utf-8", "replace")
        byte = self._byte_ids.get(token_id)
        if byte is not None:
            return bytes((byte,))
        return text.replace(SPACE_MARK, " ").encode("utf-8", "replace")


def missing_bytes(tokens: Collection[str]) -> frozenset[int]:
    """Bytes that no token of a byte-level vocabulary stands for: text with them cannot be encoded."""
    return frozenset(byte for byte, character in enumerate(byte_characters()) if character not in tokens)


def fingerprint(tokens: Iterable[str], merges: Iterable[str]) -> str:
    """A hash of the vocabulary and its merges: equal for two files exactly when they tokenize with the same ids."""
    digest = sha256()
    for part in ("\0".join(tokens), "\n".join(merges)):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()

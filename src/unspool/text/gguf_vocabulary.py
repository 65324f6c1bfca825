"""A tokenizer from GGUF metadata: every key is checked, every error names its key.

tokenizer.ggml.model    gpt2: byte-level BPE (merges, `pre`)      llama: SentencePiece's BPE (scores, byte fallback)
                        gemma4: BPE of characters (merges)        t5: SentencePiece's unigram model (scores)
tokenizer.ggml.tokens   the vocabulary            token_type   1 normal  2 unknown  3 control
tokenizer.ggml.merges   "left right", best first               4 added   5 unused   6 byte
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unspool.errors import ModelError
from unspool.text.byte_level import Words, make_words, refuse_missing
from unspool.text.end_tokens import end_ids
from unspool.text.gguf_tokens import PREFIX, Metadata, Tokens
from unspool.text.marks import MarkSplitter
from unspool.text.pretokenizers import CHARACTER_PAIRS, pre_tokenizer
from unspool.text.spm import Pieces, make_pieces
from unspool.text.token_types import ADDED, BYTE, CONTROL, UNKNOWN, UNUSED
from unspool.text.tokenizer import Encoder, Tokenizer
from unspool.text.vocabulary import SPACE_MARK, Vocabulary, fingerprint

if TYPE_CHECKING:
    from unspool.text.character_map import CharacterMap

_REFUSED = {
    "bert": "the word pieces of encoders",
    "plamo2": "PLaMo 2's own",
    "rwkv": "RWKV's own",
    "hybriddna": "of DNA",
    "whitespace": "it drops white space",
    "none": "the file brings no tokenizer",
    "no_vocab": "the file brings no tokenizer",
}

# Chat templates' names for tokens, and GGUF's.
NAMED_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # its spelling there
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}


class _Marked:
    """Marks first, then the text between them. Without `parse_special` only added words count as marks."""

    def __init__(self, tokens: Tokens, strips_after: frozenset[int] = frozenset()) -> None:
        added = tokens.texts_of(ADDED)
        self._added = MarkSplitter(added, strips_after)
        self._all = MarkSplitter(added | tokens.texts_of(CONTROL, UNKNOWN), strips_after)

    def splitter(self, parse_special: bool) -> MarkSplitter:
        return self._all if parse_special else self._added


class _ByteLevelEncoder:
    def __init__(self, marks: _Marked, words: Words) -> None:
        self._marks = marks
        self._words = words

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for part in self._marks.splitter(parse_special).split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                if self._words.missing:
                    refuse_missing(self._words.missing, part)
                ids += self._words.encode(part)
        return ids


class _SentencePieceEncoder:
    """Puts a space in front of the text and after each mark, if the vocabulary was trained that way."""

    def __init__(self, marks: _Marked, model: Pieces, space_in_front: bool) -> None:
        self._marks = marks
        self._model = model
        self._front = SPACE_MARK if space_in_front else ""

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        front = self._front
        for part in self._marks.splitter(parse_special).split(text):
            if isinstance(part, int):
                ids.append(part)
                front = self._front
            else:
                ids += self._model.encode(front + part.replace(" ", SPACE_MARK))
                front = ""
        return ids


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata; a ModelError names the wrong key."""
    source = Metadata(metadata)
    model = source.get("model", str)
    if model is None:
        raise ModelError(f"{PREFIX}model: missing; the file brings no tokenizer")
    if model not in _BUILDERS:
        why = f": {_REFUSED[model]}" if model in _REFUSED else ""
        raise ModelError(f"{PREFIX}model: {model!r} is not supported{why}; supported: {', '.join(_BUILDERS)}")
    return _BUILDERS[model](source)


def _build_byte_level(source: Metadata) -> Tokenizer:
    notes = []
    name = source.get("pre", str)
    if name in CHARACTER_PAIRS:
        return _build_character_pairs(source)
    if name is None:
        notes.append(f"{PREFIX}pre is missing; the rule 'default' was assumed and may not be the model's own")
    rule = pre_tokenizer(name or "default")
    tokens = Tokens(source)
    merges = _merges(source)
    vocabulary = Vocabulary(tokens.texts, "byte-level", special=tokens.special, literal=tokens.by_type[ADDED])
    return _finish(
        source,
        tokens,
        vocabulary=vocabulary,
        encoder=_ByteLevelEncoder(_Marked(tokens), make_words(tokens.texts, tokens.ids, merges, rule)),
        merging=merges,
        bos_id=source.token_id("bos_token_id", len(tokens)),
        adds_bos=rule.adds_bos,
        notes=notes,
    )


def _merges(source: Metadata) -> Sequence[str]:
    merges = source.sequence("merges", (str,))
    if merges is None:
        raise ModelError(f"{PREFIX}merges: missing")
    return merges


def _build_character_pairs(source: Metadata) -> Tokenizer:
    from unspool.text.character_pairs import make_character_pairs

    tokens, merges = Tokens(source), _merges(source)
    byte_of = _byte_values(tokens)
    table = _byte_table(byte_of)
    if table is None:
        raise ModelError(f"{PREFIX}token_type: {len(set(byte_of.values()))} of 256 bytes have a token")
    unknown = source.token_id("unknown_token_id", len(tokens)) or 0
    model = make_character_pairs(tokens.texts, tokens.ids, merges, table, unknown)
    return _finish(
        source,
        tokens,
        vocabulary=_sentencepiece_vocabulary(tokens, byte_of),
        encoder=_SentencePieceEncoder(_Marked(tokens), model, space_in_front=False),
        merging=merges,
        bos_id=source.token_id("bos_token_id", len(tokens)),
        adds_bos=True,
        needs_bos=source.get("model", str) == "gemma4",
    )


def _build_sentencepiece(source: Metadata) -> Tokenizer:
    tokens = Tokens(source)
    scores = _scores(source, tokens)
    byte_of = _byte_values(tokens)
    marks = [index for kind in (UNKNOWN, CONTROL, ADDED, UNUSED, BYTE) for index in tokens.by_type[kind]]
    unknown = source.token_id("unknown_token_id", len(tokens)) or 0
    model = make_pieces(tokens.texts, tokens.ids, scores, marks, _byte_table(byte_of), unknown)
    space_in_front = source.get("add_space_prefix", bool, True)
    bos = source.token_id("bos_token_id", len(tokens))
    if bos is None and tokens.ids.get("<s>") in tokens.special:
        bos = tokens.ids["<s>"]
    return _finish(
        source,
        tokens,
        vocabulary=_sentencepiece_vocabulary(tokens, byte_of),
        encoder=_SentencePieceEncoder(_Marked(tokens, _swallowing(source, tokens)), model, space_in_front),
        merging=scores,
        bos_id=bos,
        adds_bos=True,
        strips_leading_space=space_in_front,
    )


def _build_unigram(source: Metadata) -> Tokenizer:
    from unspool.text.sentencepiece import Normalizer, PieceEncoder, PieceTable
    from unspool.text.sentencepiece_file import UNIGRAM

    tokens = Tokens(source)
    scores = _scores(source, tokens)
    byte_of = _byte_values(tokens)
    unknown = source.token_id("unknown_token_id", len(tokens))
    unknown = next(iter(tokens.by_type[UNKNOWN]), 0) if unknown is None else unknown
    table = PieceTable(tokens.texts, tokens.ids, scores, tokens.by_type, _byte_table(byte_of), unknown)
    space_in_front = source.get("add_space_prefix", bool, True)
    normalizer = Normalizer(
        characters=_character_map(source),
        adds_space=space_in_front,
        removes_extra_spaces=source.get("remove_extra_whitespaces", bool, False),
    )
    return _finish(
        source,
        tokens,
        vocabulary=_sentencepiece_vocabulary(tokens, byte_of),
        encoder=PieceEncoder(table, UNIGRAM, normalizer, _Marked(tokens).splitter),
        merging=scores,
        bos_id=source.token_id("bos_token_id", len(tokens)),
        adds_bos=False,
        strips_leading_space=space_in_front,
    )


_BUILDERS = {
    "gpt2": _build_byte_level,
    "llama": _build_sentencepiece,
    "gemma4": _build_character_pairs,
    "t5": _build_unigram,
}


def _character_map(source: Metadata) -> CharacterMap | None:
    from unspool.text.character_map import CharacterMap

    numbers = source.sequence("precompiled_charsmap", (int,))
    if not numbers:
        return None
    try:
        return CharacterMap(bytes(number & 255 for number in numbers))
    except ValueError as error:
        raise ModelError(f"{PREFIX}precompiled_charsmap: {error}") from error


def _scores(source: Metadata, tokens: Tokens) -> Sequence[float]:
    scores = source.sequence("scores", (float, int), len(tokens))
    if scores is None:
        raise ModelError(f"{PREFIX}scores: missing")
    return scores


def _sentencepiece_vocabulary(tokens: Tokens, byte_of: Mapping[int, int]) -> Vocabulary:
    return Vocabulary(
        tokens.texts, "sentencepiece", special=tokens.special, literal=tokens.by_type[ADDED], bytes_of=byte_of
    )


def _byte_values(tokens: Tokens) -> dict[int, int]:
    """The byte of each token of the type BYTE."""
    return {index: _byte_value(tokens.texts[index], index) for index in tokens.by_type[BYTE]}


def _byte_value(text: str, index: int) -> int:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
    if match is None:
        raise ModelError(f"{PREFIX}tokens[{index}]: {text!r} is marked as a byte but does not name one")
    return int(match[1], 16)


def _byte_table(byte_of: Mapping[int, int]) -> list[int] | None:
    """byte -> id; a vocabulary has all 256 or falls back to its unknown token."""
    table = {byte: index for index, byte in byte_of.items()}
    return [table[byte] for byte in range(256)] if len(table) == 256 else None


def _swallowing(source: Metadata, tokens: Tokens) -> frozenset[int]:
    """Phi-3's marks consume the white space after them; GGUF has no field for it, so the model is recognized by
    name."""
    if not re.search(r"phi-?3", source.name(), re.IGNORECASE):
        return frozenset()
    keep = {tokens.ids.get(name) for name in ("<unk>", "<s>", "<|endoftext|>")}
    return frozenset(index for index in (*tokens.special, *tokens.by_type[ADDED]) if index not in keep)


def _finish(
    source: Metadata,
    tokens: Tokens,
    *,
    vocabulary: Vocabulary,
    encoder: Encoder,
    merging: Sequence[Any],
    bos_id: int | None,
    adds_bos: bool,
    strips_leading_space: bool = False,
    needs_bos: bool = False,
    notes: Sequence[str] = (),
) -> Tokenizer:
    """Beginning and end tokens: from the file, else the default of its kind of vocabulary."""
    said: bool | None = source.get("add_bos_token", bool)
    if said and bos_id is None:
        raise ModelError(f"{PREFIX}add_bos_token is true but {PREFIX}bos_token_id is missing")
    notes = list(notes)
    if needs_bos and said is False:
        notes.append(f"{PREFIX}add_bos_token is false; the token is added all the same, since the model needs it")
        said = True
    if source.get("add_eos_token", bool):
        notes.append(f"{PREFIX}add_eos_token is set; prompts end open all the same, since an answer is to follow")
    texts = tokens.texts  # not all of what was only for making it
    named = (source.token_id(f"{key}_token_id", len(tokens)) for key in ("eos", "eot", "eom"))
    return Tokenizer(
        vocabulary,
        encoder,
        bos_id=bos_id,
        eos_ids=end_ids(tokens.ids, tokens.special) | {index for index in named if index is not None},
        adds_bos=bos_id is not None and (adds_bos if said is None else said),
        strips_leading_space=strips_leading_space,
        fingerprint=lambda: fingerprint(texts, map(str, merging)),
        named_tokens=_named_tokens(source, texts),
        notes=notes,
    )


def _named_tokens(source: Metadata, texts: Sequence[str]) -> dict[str, str | list[str]]:
    """The texts of the ids that the file names. Some files use an id without a token to mean that there is none."""
    ids = {name: source.get(f"{key}_token_id", int) for name, key in NAMED_TOKENS.items()}
    return {name: texts[index] for name, index in ids.items() if index is not None and 0 <= index < len(texts)}

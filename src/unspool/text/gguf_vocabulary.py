"""A tokenizer from GGUF metadata: every key checked, every fault named by its key.

tokenizer.ggml.model    gpt2: byte-level BPE (merges, `pre`)     llama: SentencePiece (scores, byte fallback)
tokenizer.ggml.tokens   the vocabulary            token_type   1 normal  2 unknown  3 control
tokenizer.ggml.merges   "left right", best first               4 added   5 unused   6 byte
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from unspool.errors import ModelError
from unspool.text.byte_level import Words, make_words, refuse_missing
from unspool.text.marks import MarkSplitter
from unspool.text.pretokenizers import pre_tokenizer
from unspool.text.spm import Pieces, make_pieces
from unspool.text.texts import TextIds, Texts, as_texts
from unspool.text.tokenizer import Encoder, Tokenizer
from unspool.text.vocabulary import SPACE_MARK, Vocabulary, fingerprint

_PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, ADDED, UNUSED, BYTE = range(1, 7)

# Tokens that end a turn, a message or a text, whatever a file's eos_token_id says: files often name only one.
# fmt: off
END_TOKENS = frozenset(
    {"</s>", "<EOT>", "<end_of_turn>", "<end_of_utterance>", "<eos>", "<turn|>", "<|END_OF_TURN_TOKEN|>",
     "<|calls|>", "<|call|>", "<|end_of_text|>", "<|end_of_turn|>", "<|endoftext|>", "<|endofturn|>", "<|end|>",
     "<|eom_id|>", "<|eom|>", "<|eos|>", "<|eot_id|>", "<|eot|>", "<|flush|>", "<|im_end|>", "<|return|>",
     "<|tool_response>", "<｜end▁of▁sentence｜>", "[EOS]", "[EOT]", "[e~[", "_<EOT>"}
)
# fmt: on


def end_ids(ids: Mapping[str, int], marks: frozenset[int]) -> set[int]:
    """The end tokens among a vocabulary's marks, by their text."""
    found = {name: ids[name] for name in END_TOKENS if ids.get(name) in marks}
    if "<|end|>" in found and found.keys() & {"<|call|>", "<|calls|>"} and found.keys() & {"<|return|>", "<|flush|>"}:
        del found["<|end|>"]  # in these formats it ends one of an answer's messages, not the answer
    return set(found.values())


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


class _Metadata:
    """Typed access to `tokenizer.ggml.*`; a value of the wrong kind is a ModelError that names its key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(_PREFIX + key, default)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ModelError(f"{_PREFIX}{key}: expected {kind.__name__}, got {type(value).__name__} ({value!r:.40})")
        return value

    def sequence(self, key: str, kinds: tuple[type, ...], length: int | None = None) -> Sequence[Any] | None:
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return None
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise ModelError(f"{_PREFIX}{key}: expected an array, got {type(value).__name__}")
        if length is not None and len(value) != length:
            raise ModelError(f"{_PREFIX}{key}: has {len(value):,} entries; the vocabulary has {length:,}")
        if not _types_in(value) <= set(kinds):
            index = next(i for i, item in enumerate(value) if type(item) not in kinds)
            raise ModelError(
                f"{_PREFIX}{key}[{index}]: expected {kinds[0].__name__}, got {type(value[index]).__name__}"
            )
        return value

    def token_id(self, key: str, size: int) -> int | None:
        value: int | None = self.get(key, int)
        if value is not None and not 0 <= value < size:
            raise ModelError(f"{_PREFIX}{key}: id {value:,} is outside the vocabulary of {size:,}")
        return value

    def name(self) -> str:
        value = self._metadata.get("general.name", "")
        return value if isinstance(value, str) else ""


def _types_in(value: Sequence[Any]) -> set[type]:
    if isinstance(value, Texts):
        return {str}
    if isinstance(value, memoryview):
        return {float if value.format in ("f", "d") else int}
    return set(map(type, value))


class _Tokens:
    """The checked vocabulary: texts, ids by text, and ids by type."""

    def __init__(self, metadata: _Metadata) -> None:
        tokens = metadata.sequence("tokens", (str,))
        if not tokens:
            raise ModelError(f"{_PREFIX}tokens: missing or empty")
        native = as_texts(tokens)
        self.texts: Sequence[str] = tokens if native is None else native
        self.ids: Mapping[str, int] = _ids_of(tokens) if native is None else TextIds(native)
        again = _first_repeated(tokens, self.ids) if native is None else native.native.twice
        if again >= 0:
            raise ModelError(
                f"{_PREFIX}tokens: {tokens[again]!r} stands at {self.ids[tokens[again]]:,} and at {again:,}"
            )
        self.by_type: dict[int, list[int]] = {kind: [] for kind in range(NORMAL, BYTE + 1)}
        types = metadata.sequence("token_type", (int,), len(tokens)) or ()
        for index in _others(types, NORMAL):
            kind = types[index]
            if not 0 <= kind <= BYTE:
                raise ModelError(f"{_PREFIX}token_type[{index}]: unknown type {kind}")
            if kind:
                self.by_type[kind].append(index)
        self._control_by_name()

    def _control_by_name(self) -> None:
        """Some converters forget to mark end tokens; a text like `<|im_end|>` is never anything else.
        (`</s>`, `<eos>` and the like are also words of HTML and the papers, so those need their mark.)"""
        marked = {*self.by_type[CONTROL], *self.by_type[UNKNOWN]}
        for name in END_TOKENS:
            index = self.ids.get(name)
            if index is not None and index not in marked and name.startswith("<|") and name.endswith("|>"):
                if index in self.by_type[ADDED]:
                    self.by_type[ADDED].remove(index)
                self.by_type[CONTROL].append(index)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def special(self) -> frozenset[int]:
        return frozenset(self.by_type[CONTROL]) | frozenset(self.by_type[UNKNOWN])

    def texts_of(self, *kinds: int) -> dict[str, int]:
        return {self.texts[index]: index for kind in kinds for index in self.by_type[kind]}


def _ids_of(tokens: Sequence[str]) -> dict[str, int]:
    """By text, the first of equal ones. An empty text is a hole: no text leads to it, and it writes nothing."""
    ids = {token: index for index, token in zip(range(len(tokens) - 1, -1, -1), reversed(tokens), strict=True)}
    ids.pop("", None)
    return ids


def _first_repeated(tokens: Sequence[str], ids: Mapping[str, int]) -> int:
    return next((index for index, token in enumerate(tokens) if token and ids[token] != index), -1)


def _others(values: Sequence[int], usual: int) -> list[int]:
    """The places of unusual values: nearly every token is of one type."""
    if isinstance(values, memoryview) and values.format == "i":
        try:
            from unspool._native import others
        except ImportError:
            pass
        else:
            found: list[int] = others(values.cast("B"), usual)
            return found
    return [index for index, value in enumerate(values) if value != usual]


class _Marked:
    """Marks first, then the text between them. Without `parse_special` only added words count as marks."""

    def __init__(self, tokens: _Tokens, strips_after: frozenset[int] = frozenset()) -> None:
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
    """A space goes in front of the text and of what follows a mark, where the vocabulary was trained that way."""

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
    """The tokenizer described by a GGUF file's metadata; a ModelError names the key at fault."""
    source = _Metadata(metadata)
    model = source.get("model", str)
    if model == "gpt2":
        return _build_byte_level(source)
    if model == "llama":
        return _build_sentencepiece(source)
    if model is None:
        raise ModelError(f"{_PREFIX}model: missing; the file brings no tokenizer")
    raise ModelError(f"{_PREFIX}model: {model!r} is not supported (gpt2 and llama are)")


def _build_byte_level(source: _Metadata) -> Tokenizer:
    notes = []
    name = source.get("pre", str)
    if name is None:
        notes.append(f"{_PREFIX}pre is missing; the rule 'default' was assumed and may not be the model's own")
    rule = pre_tokenizer(name or "default")
    tokens = _Tokens(source)
    merges = source.sequence("merges", (str,))
    if merges is None:
        raise ModelError(f"{_PREFIX}merges: missing")
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


def _build_sentencepiece(source: _Metadata) -> Tokenizer:
    tokens = _Tokens(source)
    scores = source.sequence("scores", (float, int), len(tokens))
    if scores is None:
        raise ModelError(f"{_PREFIX}scores: missing")
    byte_of = {index: _byte_value(tokens.texts[index], index) for index in tokens.by_type[BYTE]}
    marks = [index for kind in (UNKNOWN, CONTROL, ADDED, UNUSED, BYTE) for index in tokens.by_type[kind]]
    unknown = source.token_id("unknown_token_id", len(tokens)) or 0
    model = make_pieces(tokens.texts, tokens.ids, scores, marks, _byte_table(byte_of), unknown)
    space_in_front = source.get("add_space_prefix", bool, True)
    encoder = _SentencePieceEncoder(_Marked(tokens, _swallowing(source, tokens)), model, space_in_front)
    vocabulary = Vocabulary(
        tokens.texts, "sentencepiece", special=tokens.special, literal=tokens.by_type[ADDED], bytes_of=byte_of
    )
    bos = source.token_id("bos_token_id", len(tokens))
    if bos is None and tokens.ids.get("<s>") in tokens.special:
        bos = tokens.ids["<s>"]
    return _finish(
        source,
        tokens,
        vocabulary=vocabulary,
        encoder=encoder,
        merging=scores,
        bos_id=bos,
        adds_bos=True,
        strips_leading_space=space_in_front,
    )


def _byte_value(text: str, index: int) -> int:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
    if match is None:
        raise ModelError(f"{_PREFIX}tokens[{index}]: {text!r} is marked as a byte but does not name one")
    return int(match[1], 16)


def _byte_table(byte_of: Mapping[int, int]) -> list[int] | None:
    """byte -> id; a vocabulary has all 256 or falls back to its unknown token."""
    table = {byte: index for index, byte in byte_of.items()}
    return [table[byte] for byte in range(256)] if len(table) == 256 else None


def _swallowing(source: _Metadata, tokens: _Tokens) -> frozenset[int]:
    """Phi-3's marks swallow the white space after them; GGUF has no field for it, so its name must do."""
    if not re.search(r"phi-?3", source.name(), re.IGNORECASE):
        return frozenset()
    keep = {tokens.ids.get(name) for name in ("<unk>", "<s>", "<|endoftext|>")}
    return frozenset(index for index in (*tokens.special, *tokens.by_type[ADDED]) if index not in keep)


def _finish(
    source: _Metadata,
    tokens: _Tokens,
    *,
    vocabulary: Vocabulary,
    encoder: Encoder,
    merging: Sequence[Any],
    bos_id: int | None,
    adds_bos: bool,
    strips_leading_space: bool = False,
    notes: Sequence[str] = (),
) -> Tokenizer:
    """Beginnings and ends: what the file says of them, and else what its kind of vocabulary does."""
    said: bool | None = source.get("add_bos_token", bool)
    if said and bos_id is None:
        raise ModelError(f"{_PREFIX}add_bos_token is true but {_PREFIX}bos_token_id is missing")
    notes = list(notes)
    if source.get("add_eos_token", bool):
        notes.append(f"{_PREFIX}add_eos_token is set; prompts end open all the same, since an answer is to follow")
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


def _named_tokens(source: _Metadata, texts: Sequence[str]) -> dict[str, str | list[str]]:
    """The texts of the ids that the file names. Files also give ids that no token has, to say that there is none."""
    ids = {name: source.get(f"{key}_token_id", int) for name, key in NAMED_TOKENS.items()}
    return {name: texts[index] for name, index in ids.items() if index is not None and 0 <= index < len(texts)}

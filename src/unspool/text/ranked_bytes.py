"""Byte-level vocabularies without a merge table: of all neighbouring pairs whose union is a token, the one with the
best rank is merged first.

tekken.json     Mistral's: a pattern, tokens in base64 by rank, control tokens that take the first ids
tiktoken.model  Kimi's: a line "base64 rank" for each token; tokenizer_config.json names the control tokens behind them

A file's regular expression is untrusted: it is compared with the known ones and not run.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unspool.errors import ModelError
from unspool.records import record
from unspool.text import library
from unspool.text.byte_level import library_cuts
from unspool.text.marks import MarkSplitter
from unspool.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer, cut_ascii
from unspool.text.spm import make_pieces
from unspool.text.texts import TextIds, as_texts
from unspool.text.vocabulary import byte_characters

MAX_FILE = 32 << 20  # the largest known has 19 MB
MAX_TOKENS = 1 << 20
MAX_TOKEN = 1024  # bytes
_KIMI_RESERVED = 256


@record(frozen=True)
class RankedBytes:
    """Tokens in byte-level spelling by rank; the control tokens' texts by id, and which of them are printed."""

    tokens: list[str]
    first_id: int  # of the tokens
    marks: dict[int, str]
    printed: frozenset[int]
    rule: PreTokenizer

    @property
    def texts(self) -> list[str]:
        """The texts of all ids; the text of an unused id is empty."""
        texts = [""] * max(self.first_id + len(self.tokens), max(self.marks, default=-1) + 1)
        texts[self.first_id : self.first_id + len(self.tokens)] = self.tokens
        for index, text in self.marks.items():
            texts[index] = text
        return texts


class RankedEncoder:
    def __init__(self, source: RankedBytes) -> None:
        found = as_texts(source.tokens)
        ids: Mapping[str, int]
        ids = {text: rank for rank, text in enumerate(source.tokens)} if found is None else TextIds(found)
        scores = [-float(rank) for rank in range(len(source.tokens))]
        self._ids, self._first_id = ids, source.first_id
        self._pieces = make_pieces(found or source.tokens, ids, scores, [], None, unk=-1)
        self._rule = source.rule
        self._all = MarkSplitter({text: index for index, text in source.marks.items()})
        self._cuts: Any = None

    def encode(self, text: str, parse_special: bool) -> list[int]:
        if not parse_special:
            return self._encode(text)
        ids: list[int] = []
        for part in self._all.split(text):
            ids += [part] if isinstance(part, int) else self._encode(part)
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        characters = byte_characters()
        for word in self._words(text):
            spelled = "".join([characters[byte] for byte in word.encode("utf-8")])
            whole = self._ids.get(spelled)
            ranks = self._pieces.encode(spelled) if whole is None else [whole]
            ids += [self._first_id + rank for rank in ranks]
        return ids

    def _words(self, text: str) -> list[str]:
        words = cut_ascii(self._rule, text) if text.isascii() else None
        if words is None:
            if self._cuts is None:
                from tokenizers import pre_tokenizers

                self._cuts = pre_tokenizers.Sequence(library_cuts(self._rule))
            words = library.cut(self._cuts, text)
        return words


def read_tekken(path: Path, content: Mapping[str, Any]) -> RankedBytes:
    """`content`: the JSON of the tekken.json at `path`."""
    config = content.get("config")
    if not isinstance(config, dict):
        raise ModelError(f"{path}: config: expected an object")
    size, reserved = (_count(path, config, key) for key in ("default_vocab_size", "default_num_special_tokens"))
    rule = next((rule for rule in PRE_TOKENIZERS.values() if rule.patterns == (config.get("pattern"),)), None)
    if rule is None:
        raise ModelError(f"{path}: config.pattern: not one of the known patterns: {str(config.get('pattern'))[:80]!r}")
    entries = content.get("vocab")
    if not isinstance(entries, list) or not reserved < size <= reserved + len(entries):
        raise ModelError(
            f"{path}: vocab: expected a list of at least {size - reserved:,} tokens, as config.default_vocab_size less "
            "config.default_num_special_tokens says"
        )
    encoded = [_ranked(path, entry, rank) for rank, entry in enumerate(entries[: size - reserved])]
    marks, printed = _tekken_marks(path, content.get("special_tokens"), reserved)
    return RankedBytes(_spelled(path, encoded), reserved, marks, printed, rule)


def _count(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
        raise ModelError(f"{path}: config.{key} is {value!r:.40}; expected 0 to {MAX_TOKENS:,}")
    return value


def _ranked(path: Path, entry: Any, rank: int) -> bytes:
    if not isinstance(entry, dict) or entry.get("rank") != rank or not isinstance(entry.get("token_bytes"), str):
        raise ModelError(f"{path}: vocab[{rank}]: expected rank {rank} and token_bytes, got {entry!r:.80}")
    return _decoded(path, f"vocab[{rank}].token_bytes", entry["token_bytes"])


# The control tokens of files that do not list them.
_TEKKEN_MARKS = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)


def _tekken_marks(path: Path, entries: Any, reserved: int) -> tuple[dict[int, str], frozenset[int]]:
    marks = {index: f"<SPECIAL_{index}>" for index in range(reserved)}
    if entries is None:
        return marks | dict(list(enumerate(_TEKKEN_MARKS.split()))[:reserved]), frozenset()
    if not isinstance(entries, list) or len(entries) > reserved:
        raise ModelError(f"{path}: special_tokens: expected a list of at most {reserved:,} tokens")
    printed = set()
    for index, entry in enumerate(entries):
        text = entry.get("token_str") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text or entry.get("rank") != index:
            raise ModelError(f"{path}: special_tokens[{index}]: expected rank {index} and token_str, got {entry!r:.80}")
        marks[index] = text
        if entry.get("is_control") is False:
            printed.add(index)
    if len(set(marks.values())) != len(marks):
        raise ModelError(f"{path}: special_tokens: two have the same text")
    return marks, frozenset(printed)


def read_tiktoken(path: Path, settings: Mapping[str, Any]) -> RankedBytes:
    """`settings`: the content of tokenizer_config.json, which says which model's tokenizer it is."""
    if "tokenization_kimi" not in str(settings.get("auto_map")):
        raise ModelError(f"{path}: a tiktoken file has no pattern; only that of Kimi's tokenizer_config.json is known")
    if path.stat().st_size > MAX_FILE:
        raise ModelError(f"{path}: larger than {MAX_FILE:,} bytes")
    encoded: list[bytes] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        text, _, rank = line.partition(b" ")
        if rank != b"%d" % len(encoded) or len(encoded) >= MAX_TOKENS:
            raise ModelError(f"{path}: line {number:,}: expected a token and the rank {len(encoded):,}")
        encoded.append(_decoded(path, f"line {number:,}", text.decode("ascii", "replace")))
    first = len(encoded)
    marks = {index: f"<|reserved_token_{index}|>" for index in range(first, first + _KIMI_RESERVED)}
    for index, (text_of, _) in added_tokens(path, settings).items():
        if index in marks:
            marks[index] = text_of
    return RankedBytes(_spelled(path, encoded), 0, marks, frozenset(), PRE_TOKENIZERS["kimi-k2"])


def _decoded(path: Path, where: str, text: str) -> bytes:
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ModelError(f"{path}: {where}: not base64: {error}") from error
    if not 0 < len(found) <= MAX_TOKEN:
        raise ModelError(f"{path}: {where}: a token of {len(found):,} bytes; 1 to {MAX_TOKEN:,} are possible")
    return found


def _spelled(path: Path, tokens: Sequence[bytes]) -> list[str]:
    characters = byte_characters()
    spelled = ["".join([characters[byte] for byte in token]) for token in tokens]
    if len(set(spelled)) != len(spelled):
        raise ModelError(f"{path}: two tokens have the same bytes")
    if missing := {*characters} - {*spelled}:
        raise ModelError(f"{path}: {len(missing)} of 256 bytes have no token")
    return spelled


def added_tokens(path: Path, settings: Mapping[str, Any]) -> dict[int, tuple[str, Mapping[str, Any]]]:
    """The `added_tokens_decoder` of tokenizer_config.json: texts and settings by id."""
    entries = settings.get("added_tokens_decoder") or {}
    found: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text or not key.isdecimal() or int(key) > MAX_TOKENS:
            raise ModelError(f"{path.parent}: added_tokens_decoder: {key!r:.20} has no content, or is no token's id")
        found[int(key)] = (text, entry)
    return found

"""A tokenizer from a Hugging Face directory: one file has the vocabulary, tokenizer_config.json names the marks.

tokenizer.json    whatever the `tokenizers` library reads (`library_file.py`)
tokenizer.model   SentencePiece (`sentencepiece_file.py`)
tekken.json       Mistral's (`ranked_bytes.py`)
tiktoken.model    Kimi's (`ranked_bytes.py`)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from unspool.errors import ModelError
from unspool.records import record
from unspool.text.character_map import CharacterMap
from unspool.text.end_tokens import end_ids
from unspool.text.library_file import LibraryEncoder
from unspool.text.marks import MarkSplitter
from unspool.text.ranked_bytes import RankedBytes, RankedEncoder, added_tokens, read_tekken, read_tiktoken
from unspool.text.sentencepiece import Normalizer, PieceEncoder, PieceTable
from unspool.text.sentencepiece_file import MAX_PIECES, SentencePieceFile, read_sentencepiece
from unspool.text.token_types import BYTE, CONTROL, UNKNOWN
from unspool.text.tokenizer import Encoder, Tokenizer
from unspool.text.vocabulary import Spelling, Vocabulary, fingerprint

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
MAX_SETTINGS = 32 << 20


@record(frozen=True)
class _Source:
    """The vocabulary of a file. `own_bos`, `own_eos`: the tokens that the file itself names, if any."""

    tokens: Sequence[str]
    spelling: Spelling
    special: frozenset[int]
    encoder: Encoder
    fingerprint: Callable[[], str]
    adds_bos: Callable[[int | None], bool]
    literal: frozenset[int] = frozenset()
    strips_leading_space: bool = False
    own_bos: int | None = None
    own_eos: int | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def build(path: Path, config: Mapping[str, Any], extra_eos: Collection[int]) -> Tokenizer:
    """The tokenizer of the directory at `path`; a ModelError names the file at fault."""
    settings = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    source = _open(path, settings)
    tokens = source.tokens
    ids = {text: index for index, text in enumerate(tokens) if text}
    if source.spelling == "byte-level":  # a control token may have the text of other tokens
        ids |= {tokens[index]: index for index in sorted(source.special)}
    byte_of = {}
    if source.spelling == "sentencepiece":
        byte_of = {index: int(found[1], 16) for text, index in ids.items() if (found := _BYTE_TOKEN.fullmatch(text))}
    bos = _named_id("bos_token", settings, config, ids, path, source.own_bos)
    eos = _named_id("eos_token", settings, config, ids, path, source.own_eos)
    ends = {eos, *extra_eos, *_config_eos(config)} - {None} | end_ids(ids, source.special)
    adds_bos = settings.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = source.adds_bos(bos)
    return Tokenizer(
        Vocabulary(tokens, source.spelling, special=source.special, literal=source.literal, bytes_of=byte_of),
        source.encoder,
        bos_id=bos,
        eos_ids={index for index in ends if index is not None},
        adds_bos=bos is not None and adds_bos,
        strips_leading_space=source.strips_leading_space,
        fingerprint=source.fingerprint,
        named_tokens={**source.named, **_named_tokens(settings)},
        notes=source.notes,
    )


def _open(path: Path, settings: Mapping[str, Any]) -> _Source:
    names = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model")
    name = next((name for name in names if (path / name).is_file()), None)
    if name == "tokenizer.json":
        return _from_library(path / name)
    if name == "tokenizer.model":
        return _from_sentencepiece(path, settings)
    if name == "tekken.json":
        return _from_ranks(read_tekken(path / name, _read_json(path / name)), own_marks=True)
    if name == "tiktoken.model":
        return _from_ranks(read_tiktoken(path / name, settings), own_marks=False)
    raise ModelError(f"{path}: none of {', '.join(names)}: the model directory brings no tokenizer")


def _from_library(file: Path) -> _Source:
    encoder = LibraryEncoder(file)
    report = encoder.report
    # Gemma's runs of "▁" are added tokens, and stand for spaces as any "▁" does
    literal = report.added if report.spelling != "sentencepiece" else []
    return _Source(
        report.tokens,
        report.spelling,
        frozenset(report.special),
        encoder,
        encoder.fingerprint,
        adds_bos=lambda bos: report.in_front == [bos],  # the file's encoding of an empty text shows it
        literal=frozenset(literal),
        strips_leading_space=report.strips_leading_space,
    )


def _from_ranks(source: RankedBytes, own_marks: bool) -> _Source:
    texts = source.texts
    bos, eos = (1, 2) if own_marks and len(source.marks) > 2 else (None, None)
    return _Source(
        texts,
        "byte-level",
        frozenset(source.marks) - source.printed,
        RankedEncoder(source),
        lambda: fingerprint(texts, ()),
        adds_bos=lambda _: own_marks,
        literal=source.printed,
        own_bos=bos,
        own_eos=eos,
        named={} if bos is None or eos is None else {"bos_token": texts[bos], "eos_token": texts[eos]},
    )


def _from_sentencepiece(path: Path, settings: Mapping[str, Any]) -> _Source:
    file = path / "tokenizer.model"
    source = read_sentencepiece(file)
    marks, special, strips, notes = _add_tokens(path, settings, source)
    ids = {source.pieces[index]: index for index in reversed(range(len(source.pieces))) if source.pieces[index]}
    bytes_of = source.ids_of(BYTE)
    if bad := [index for index in bytes_of if not _BYTE_TOKEN.fullmatch(source.pieces[index])]:
        raise ModelError(f"{file}: pieces[{bad[0]}]: {source.pieces[bad[0]]!r:.40} is marked as a byte and names none")
    byte_ids = [ids.get(f"<0x{byte:02X}>", -1) for byte in range(256)] if bytes_of else None
    if byte_ids and set(byte_ids) - set(bytes_of):
        raise ModelError(f"{file}: pieces: {len(bytes_of)} bytes have a piece; all 256 or none were expected")
    by_type = {kind: source.ids_of(kind) for kind in set(source.types)}
    unknown = by_type[UNKNOWN][0]
    table = PieceTable(source.pieces, ids, source.scores, by_type, byte_ids, unknown)
    named = {"bos_token": source.bos_id, "eos_token": source.eos_id}
    named = {name: index for name, index in named.items() if 0 <= index < len(source.pieces)}
    texts, scores = source.pieces, source.scores
    return _Source(
        texts,
        "sentencepiece",
        special,
        PieceEncoder(table, source.model, _normalizer(file, settings, source), _splitter(marks, special, strips)),
        lambda: fingerprint(texts, map(str, scores)),
        adds_bos=lambda bos: bos is not None,
        literal=frozenset(marks.values()) - special,
        strips_leading_space=source.adds_space and not source.space_is_suffix,
        own_bos=named.get("bos_token"),
        own_eos=named.get("eos_token"),
        named={name: texts[index] for name, index in named.items()} | {"unk_token": texts[unknown]},
        notes=notes,
    )


def _normalizer(file: Path, settings: Mapping[str, Any], source: SentencePieceFile) -> Normalizer:
    try:
        characters = CharacterMap(source.character_map) if source.character_map else None
    except ValueError as error:
        raise ModelError(f"{file}: normalizer_spec.precompiled_charsmap: {error}") from error
    return Normalizer(
        characters=characters,
        adds_space=source.adds_space,
        removes_extra_spaces=source.removes_extra_spaces,
        space_is_suffix=source.space_is_suffix,
        space_everywhere=settings.get("legacy") is not False,
    )


def _splitter(
    marks: Mapping[str, int], special: frozenset[int], strips: frozenset[int]
) -> Callable[[bool], MarkSplitter]:
    every = MarkSplitter(marks, strips)
    added = MarkSplitter({text: index for text, index in marks.items() if index not in special}, strips)
    return lambda parse_special: every if parse_special else added


def _add_tokens(
    path: Path, settings: Mapping[str, Any], source: SentencePieceFile
) -> tuple[dict[str, int], frozenset[int], frozenset[int], tuple[str, ...]]:
    """Adds the directory's tokens to the model's. Returns the marks by their text; those that are control tokens; those
    that consume the white space after them; and settings of the files that are not supported."""
    added: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for text, index in _read_json(path / "added_tokens.json").items():
        if not isinstance(index, int) or isinstance(index, bool) or not text:
            raise ModelError(f"{path / 'added_tokens.json'}: {text!r:.40} has the id {index!r:.20}")
        added[index] = (text, {})
    added |= added_tokens(path / "tokenizer_config.json", settings)
    own = set(source.ids_of(CONTROL, UNKNOWN))
    for index, (text, _) in sorted(added.items()):
        if not 0 <= index < MAX_PIECES:
            raise ModelError(f"{path}: the added token {text!r:.40} has the id {index:,}")
        missing = index + 1 - len(source.pieces)
        if missing > 0:
            source.pieces += [""] * missing
            source.scores.extend([0.0] * missing)
            source.types += [CONTROL] * missing
        source.pieces[index] = text
    special = own | {index for index, (_, entry) in added.items() if entry.get("special", False)}
    for index in added:
        if source.types[index] != UNKNOWN:
            source.types[index] = CONTROL  # no longer a piece of text: it is found as a mark before
    marks = {source.pieces[index]: index for index in sorted(own | set(added))}
    strips = frozenset(index for index, (_, entry) in added.items() if entry.get("rstrip"))
    left = sorted(text for text, entry in added.values() if entry.get("lstrip"))
    notes = (f"tokenizer_config.json: lstrip of {', '.join(left)[:80]} is not done",) if left else ()
    return marks, frozenset(special), strips, notes


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    if file.stat().st_size > MAX_SETTINGS:
        raise ModelError(f"{file}: larger than {MAX_SETTINGS:,} bytes")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: expected an object, got {type(value).__name__}")
    return value


def _named_id(
    name: str,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    ids: Mapping[str, int],
    path: Path,
    own: int | None,
) -> int | None:
    """The id of a mark that tokenizer_config.json names by its text, or config.json by its id; else the file's own."""
    token = _content(settings.get(name))
    if token is not None:
        if token not in ids:
            raise ModelError(f"{path}: {name} is {token!r}, which the vocabulary lacks")
        return ids[token]
    index = config.get(f"{name}_id")
    return index if isinstance(index, int) else own


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """The tokens that the configuration names, by those names, for chat templates."""
    extra = settings.get("extra_special_tokens")
    entries = {name: value for name, value in settings.items() if name.endswith("_token")}
    named: dict[str, str | list[str]] = {}
    for name, value in (entries | (extra if isinstance(extra, dict) else {})).items():
        if (text := _content(value)) is not None:
            named[name] = text
    additional = settings.get("additional_special_tokens")
    if isinstance(additional, list):
        named["additional_special_tokens"] = [text for each in additional if (text := _content(each)) is not None]
    return named


def _content(token: Any) -> str | None:
    """A token's text: files have it as a string, or as an object that also says how it is matched."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _config_eos(config: Mapping[str, Any]) -> set[int]:
    """config.json may name one end token or several."""
    value = config.get("eos_token_id")
    return {index for index in (value if isinstance(value, list) else [value]) if isinstance(index, int)}

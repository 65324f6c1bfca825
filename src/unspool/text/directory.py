"""A tokenizer from a Hugging Face directory: tokenizer.json does the work, tokenizer_config.json names the marks."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from unspool.errors import ModelError
from unspool.text.gguf_vocabulary import end_ids
from unspool.text.tokenizer import Tokenizer
from unspool.text.vocabulary import Spelling, Vocabulary, fingerprint

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class _LibraryEncoder:
    """The `tokenizers` library as it stands. Whether marks are parsed is a switch on the object and not an argument
    of the call, so a lock keeps two threads from turning it under each other's hands."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._lock = threading.Lock()

    def encode(self, text: str, parse_special: bool) -> list[int]:
        with self._lock:
            self._library.encode_special_tokens = not parse_special
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids


def build(path: Path, config: Mapping[str, Any], extra_eos: Collection[int]) -> Tokenizer:
    """The tokenizer of the directory at `path`; a ModelError names the file at fault."""
    file = path / "tokenizer.json"
    library = _load(file)
    library.no_padding()
    library.no_truncation()
    settings = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    added = library.get_added_tokens_decoder()
    ids: dict[str, int] = library.get_vocab(with_added_tokens=True)
    tokens = _in_order(ids, file)
    special = frozenset(index for index, token in added.items() if token.special)
    spelling, strips_leading_space = _spelling(library, file)
    byte_of = {}
    if spelling == "sentencepiece":
        byte_of = {index: int(found[1], 16) for text, index in ids.items() if (found := _BYTE_TOKEN.fullmatch(text))}
    bos = _named_id("bos_token", settings, config, ids, path)
    eos = _named_id("eos_token", settings, config, ids, path)
    ends = {eos, *extra_eos, *_config_eos(config)} - {None} | end_ids(ids, special)
    return Tokenizer(
        Vocabulary(tokens, spelling, special=special, literal=added.keys(), bytes_of=byte_of),
        _LibraryEncoder(library),
        bos_id=bos,
        eos_ids={index for index in ends if index is not None},
        adds_bos=bos is not None and _adds_bos(library, bos, settings),
        strips_leading_space=strips_leading_space,
        fingerprint=lambda: fingerprint(tokens, _merges(file)),
        named_tokens=_named_tokens(settings),
    )


def _load(file: Path) -> Any:
    import tokenizers

    if not file.is_file():
        raise ModelError(f"{file}: missing; the model directory brings no tokenizer")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for everything it cannot read
        raise ModelError(f"{file}: not a tokenizer this program can read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: expected an object, got {type(value).__name__}")
    return value


def _in_order(ids: Mapping[str, int], file: Path) -> list[str]:
    """The token texts by id; ids that no token has (some vocabularies have holes) hold nothing."""
    if not ids:
        raise ModelError(f"{file}: the vocabulary is empty")
    size = max(ids.values()) + 1
    if size > 4 * len(ids) + 65_536:
        raise ModelError(f"{file}: ids run up to {size - 1:,} but there are only {len(ids):,} tokens")
    tokens = [""] * size
    for text, index in ids.items():
        tokens[index] = text
    return tokens


def _spelling(library: Any, file: Path) -> tuple[Spelling, bool]:
    """How tokens are spelled, and whether decoding takes a space from the front, read from the decoder."""
    if library.decoder is None:
        raise ModelError(f"{file}: decoder: missing, so it is not known how tokens are spelled")
    parts = list(_flatten(json.loads(library.decoder.__getstate__())))
    kinds = [part.get("type") for part in parts]
    if "ByteLevel" in kinds:
        return "byte-level", False
    if "Metaspace" in kinds:
        metaspace = parts[kinds.index("Metaspace")]
        return "sentencepiece", metaspace.get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds or "Replace" in kinds:
        return "sentencepiece", any(part.get("type") == "Strip" and part.get("start", 0) > 0 for part in parts)
    raise ModelError(f"{file}: decoder: {'+'.join(map(str, kinds))} is not supported")


def _flatten(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        for part in decoder.get("decoders", ()):
            yield from _flatten(part)
    else:
        yield decoder


def _named_id(
    name: str, settings: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int], path: Path
) -> int | None:
    """The id of a mark that tokenizer_config.json names by its text, or config.json by its id."""
    token = _content(settings.get(name))
    if token is not None:
        if token not in ids:
            raise ModelError(f"{path}: {name} is {token!r}, which the vocabulary lacks")
        return ids[token]
    index = config.get(f"{name}_id")
    return index if isinstance(index, int) else None


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """The tokens that the configuration names, by those names: chat templates know them by these."""
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
    """A token's text: files write it as it is, or as an object that says how it is matched, too."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _config_eos(config: Mapping[str, Any]) -> set[int]:
    """config.json may name one end token or several."""
    value = config.get("eos_token_id")
    return {index for index in (value if isinstance(value, list) else [value]) if isinstance(index, int)}


def _adds_bos(library: Any, bos: int, settings: Mapping[str, Any]) -> bool:
    """tokenizer_config.json may say; else what the post-processor does to an empty text tells."""
    said = settings.get("add_bos_token")
    if isinstance(said, bool):
        return said
    return library.encode("", add_special_tokens=True).ids[:1] == [bos]


def _merges(file: Path) -> Iterator[str]:
    """Both ways tokenizer.json writes merges ("a b" and ["a", "b"]), as GGUF writes them."""
    for merge in json.loads(file.read_text("utf-8")).get("model", {}).get("merges", ()):
        yield merge if isinstance(merge, str) else " ".join(merge)

"""The `tokenizers` library in its own process, because it reads an untrusted tokenizer.json.

Such a file can make the library panic, abort, take all memory or never return (regular expressions that backtrack,
normalizers that multiply the text). `unspool.isolation` runs this module with limits on memory and time; the first byte
of a reply is its type.

    L file       ─► + what the vocabulary is (JSON)
    E… text      ─► + token ids (u32)           E0: control tokens' names are text; E1: they are control tokens
    F            ─► + fingerprint
                    - what is wrong with the file or the text      ? no file is loaded (the process is a new one)
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from unspool.text.vocabulary import fingerprint

OK, WRONG, NOT_LOADED = b"+", b"-", b"?"


class _Loaded:
    file = b""
    library: Any = None


class RefusedError(Exception):
    """An error in the file."""


def answer(request: bytes) -> bytes:
    """Answer a request of the parent process; see above. The process reports a MemoryError."""
    operation, content = request[:1], request[1:]
    if operation != b"L" and _Loaded.library is None:
        return NOT_LOADED
    try:
        if operation == b"L":
            return OK + _load(content)
        if operation == b"E":
            return OK + _encode(content[1:].decode("utf-8"), content[:1] == b"1")
        return OK + _fingerprint().encode()
    except MemoryError:
        raise
    except RefusedError as error:
        return WRONG + str(error).encode("utf-8", "replace")
    except BaseException as error:  # the library raises bare Exceptions; a panic is not an Exception
        return WRONG + f"{type(error).__name__}: {str(error)[:300]}".encode("utf-8", "replace")


def _load(file: bytes) -> bytes:
    library = tokenizers.Tokenizer.from_buffer(file)
    library.no_padding()
    library.no_truncation()
    added = library.get_added_tokens_decoder()
    tokens = _in_order(library.get_vocab(with_added_tokens=True))
    spelling, strips_leading_space = _spelling(library.decoder)
    report = {
        "tokens": tokens,
        "added": sorted(added),
        "special": sorted(index for index, token in added.items() if token.special),
        "spelling": spelling,
        "strips_leading_space": strips_leading_space,
        "in_front": library.encode("", add_special_tokens=True).ids[:1],
    }
    _Loaded.file, _Loaded.library = file, library
    return json.dumps(report, ensure_ascii=False).encode()


def _in_order(ids: Mapping[str, int]) -> list[str]:
    """The token texts by id; unused ids (some vocabularies have gaps) are empty."""
    if not ids:
        raise RefusedError("the vocabulary is empty")
    size = max(ids.values()) + 1
    if size > 4 * len(ids) + 65_536:
        raise RefusedError(f"ids run up to {size - 1:,} but there are only {len(ids):,} tokens")
    tokens = [""] * size
    for text, index in ids.items():
        tokens[index] = text
    return tokens


def _spelling(decoder: Any) -> tuple[str, bool]:
    """How tokens are spelled, and whether decoding takes a space from the front, read from the decoder."""
    if decoder is None:
        raise RefusedError("decoder: missing, so it is not known how tokens are spelled")
    parts = list(_flatten(json.loads(decoder.__getstate__())))
    kinds = [part.get("type") for part in parts]
    if "ByteLevel" in kinds:
        return "byte-level", False
    if "Metaspace" in kinds:
        metaspace = parts[kinds.index("Metaspace")]
        return "sentencepiece", metaspace.get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds or "Replace" in kinds:
        return "sentencepiece", any(part.get("type") == "Strip" and part.get("start", 0) > 0 for part in parts)
    raise RefusedError(f"decoder: {'+'.join(map(str, kinds))[:200]} is not supported")


def _flatten(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        for part in decoder.get("decoders", ()):
            yield from _flatten(part)
    else:
        yield decoder


def _encode(text: str, parse_special: bool) -> bytes:
    _Loaded.library.encode_special_tokens = not parse_special
    return array("I", _Loaded.library.encode(text, add_special_tokens=False).ids).tobytes()


def _fingerprint() -> str:
    """Of the vocabulary and its merges, which files write in two ways ("a b" and ["a", "b"]); GGUF writes the first."""
    merges = json.loads(_Loaded.file).get("model", {}).get("merges", ())
    tokens = _in_order(_Loaded.library.get_vocab(with_added_tokens=True))
    return fingerprint(tokens, (merge if isinstance(merge, str) else " ".join(merge) for merge in merges))

"""The keys `tokenizer.ggml.*` of a GGUF file: typed values, and the vocabulary with its types; every error names its
key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unspool.errors import ModelError
from unspool.text.end_tokens import END_TOKENS
from unspool.text.texts import TextIds, Texts, as_texts
from unspool.text.token_types import ADDED, BYTE, CONTROL, NORMAL, UNKNOWN

PREFIX = "tokenizer.ggml."


class Metadata:
    """Typed access to `tokenizer.ggml.*`; a value of the wrong kind is a ModelError that names its key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(PREFIX + key, default)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ModelError(f"{PREFIX}{key}: expected {kind.__name__}, got {type(value).__name__} ({value!r:.40})")
        return value

    def sequence(self, key: str, kinds: tuple[type, ...], length: int | None = None) -> Sequence[Any] | None:
        value = self._metadata.get(PREFIX + key)
        if value is None:
            return None
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise ModelError(f"{PREFIX}{key}: expected an array, got {type(value).__name__}")
        if length is not None and len(value) != length:
            raise ModelError(f"{PREFIX}{key}: has {len(value):,} entries; the vocabulary has {length:,}")
        if not _types_in(value) <= set(kinds):
            index = next(i for i, item in enumerate(value) if type(item) not in kinds)
            raise ModelError(f"{PREFIX}{key}[{index}]: expected {kinds[0].__name__}, got {type(value[index]).__name__}")
        return value

    def token_id(self, key: str, size: int) -> int | None:
        value: int | None = self.get(key, int)
        if value is not None and not 0 <= value < size:
            raise ModelError(f"{PREFIX}{key}: id {value:,} is outside the vocabulary of {size:,}")
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


class Tokens:
    """The checked vocabulary: texts, ids by text, and ids by type."""

    def __init__(self, metadata: Metadata) -> None:
        tokens = metadata.sequence("tokens", (str,))
        if not tokens:
            raise ModelError(f"{PREFIX}tokens: missing or empty")
        native = as_texts(tokens)
        self.texts: Sequence[str] = tokens if native is None else native
        self.ids: Mapping[str, int] = _ids_of(tokens) if native is None else TextIds(native)
        again = _first_repeated(tokens, self.ids) if native is None else native.native.twice
        if again >= 0:
            raise ModelError(
                f"{PREFIX}tokens: {tokens[again]!r} stands at {self.ids[tokens[again]]:,} and at {again:,}"
            )
        self.by_type: dict[int, list[int]] = {kind: [] for kind in range(NORMAL, BYTE + 1)}
        types = metadata.sequence("token_type", (int,), len(tokens)) or ()
        for index in _others(types, NORMAL):
            kind = types[index]
            if not 0 <= kind <= BYTE:
                raise ModelError(f"{PREFIX}token_type[{index}]: unknown type {kind}")
            if kind:
                self.by_type[kind].append(index)
        self._control_by_name()

    def _control_by_name(self) -> None:
        """Some converters forget to mark end tokens; a text like `<|im_end|>` is never anything else. (`</s>`, `<eos>`
        and similar texts also occur in HTML and in papers, so they need their mark.)"""
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
    """Ids by text; of equal texts the first. An empty text is an unused id: it has no entry here."""
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

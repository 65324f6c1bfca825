"""A GGUF file's keys with some of them set by the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unspool.errors import ModelError
from unspool.overrides import Override, parse_kv, typed


class OverriddenKeys(dict[str, Any]):
    """Metadata in which the caller has replaced some values. It records which keys are read: overriding a key that
    nothing reads is an error."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], texts: Sequence[str]) -> None:
        super().__init__(metadata)
        self._path, self._read = path, set[str]()
        overrides = []
        for text in texts:
            key, given = parse_kv(text)
            before = metadata.get(key)
            value = self[key] = self._checked(key, given, before)
            if before != value:
                overrides.append(Override("override_kv", f"{key}={typed(key, value)}", _written(before)))
        self.overrides, self._changed = tuple(overrides), {parse_kv(text)[0] for text in texts}

    def _checked(self, key: str, value: Any, before: Any) -> Any:
        if type(before) is float and type(value) is int:
            return float(value)
        if before is not None and type(before) is not type(value):
            kind = type(before).__name__ if isinstance(before, int | float | str) else "list"
            raise ModelError(
                f"override_kv: {self._path} has {key} as a {kind}, not as {type(value).__name__} {value!r:.60}"
            )
        return value

    def check_read(self, *later: str) -> None:
        """Raise an error for an override of a key that nothing has read. Keys that begin with one of `later` are read
        later."""
        later = tuple(prefix for prefix in later if prefix)
        for key in sorted(self._changed - self._read):
            if later and key.startswith(later):
                continue
            from difflib import get_close_matches

            close = get_close_matches(key, self._read, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ModelError(f"override_kv: nothing reads the key {key!r:.100} of {self._path}{hint}")

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)


def _written(value: Any) -> str | None:
    return None if value is None else f"{value!r:.60}"

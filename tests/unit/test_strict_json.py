"""JSON, strictly."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from unspool import strict_json


def test_values_are_as_written() -> None:
    assert strict_json.loads(b'{"a": [1, 2.5, null, {"b": "\\u00e9"}], "c": {}}') == {
        "a": [1, 2.5, None, {"b": "é"}],
        "c": {},
    }


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', '{"a": 1, "b": {"c": 1, "c": 1}}', "{", ""])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        strict_json.loads(text)


@pytest.mark.parametrize(
    "twice",
    [lambda n: f',"{n - 1}":2', lambda n: ',"0":2', lambda n: f',"{n // 2}":2'],
    ids=("last", "first", "middle"),
)
def test_a_double_among_many_keys_is_found_in_linear_time(twice: Callable[[int], str]) -> None:
    """600 KB with one key twice; comparing every key with every other takes 40 s."""
    count = 60_000
    text = "{" + ",".join(f'"{number}":1' for number in range(count)) + twice(count) + "}"
    start = time.monotonic()
    with pytest.raises(ValueError, match="comes twice"):
        strict_json.loads(text)
    assert time.monotonic() - start < 10

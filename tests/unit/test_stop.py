"""The stop matcher against a brute-force reading of its own definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.errors import RequestError
from unspool.text.stop import StopMatcher


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the match that is complete first; of those, the one that starts first."""
    ends = [(end, end - len(s)) for end in range(1, len(text) + 1) for s in stops if text[:end].endswith(s)]
    return (min(ends)[1], min(ends)[0]) if ends else None


def could_become_stop(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that is a proper beginning of a stop."""
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


few_letters = st.text(alphabet="abé🙂\n", max_size=40)
stop_sets = st.lists(st.text(alphabet="abé🙂\n", min_size=1, max_size=6), max_size=5)


@given(few_letters, stop_sets, st.lists(st.integers(0, 1000), max_size=12), st.booleans())
def test_stream_equals_the_definition_however_it_is_cut(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    shown, seen = "", ""
    for piece in cut(text, places):
        safe, matched = matcher.push(piece)
        shown += safe
        seen += piece
        if matched is not None:
            break
        assert first_match(seen, stops) is None
        assert matcher.held == could_become_stop(seen, stops), "held more or less than could become a stop"
        assert shown == seen[: len(seen) - matcher.held], "leaked or lost"
    found = first_match(text, stops)
    if found is None:
        assert matcher.matched is None
        assert shown + matcher.flush() == text
    else:
        start, end = found
        assert matcher.matched == text[start:end]
        assert shown == text[: end if include else start]
        assert matcher.push("more") == ("", None)
        assert matcher.flush() == ""


@given(few_letters, stop_sets.filter(bool))
def test_one_character_at_a_time_equals_all_at_once(text: str, stops: list[str]) -> None:
    whole, stepped = StopMatcher(stops), StopMatcher(stops)
    at_once = whole.push(text)[0] + whole.flush()
    one_by_one = "".join(stepped.push(character)[0] for character in text) + stepped.flush()
    assert one_by_one == at_once
    assert stepped.matched == whole.matched


@given(st.text(max_size=60), st.lists(st.text(min_size=1, max_size=4), max_size=4), st.integers(0, 60))
def test_any_text(text: str, stops: list[str], place: int) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece)[0] for piece in cut(text, [place])) + matcher.flush()
    found = first_match(text, stops)
    assert shown == (text if found is None else text[: found[0]])


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["###"], "a##b###c", "a##b", "###"),
        (["abc", "b"], "abc", "a", "b"),  # complete first wins
        (["abc", "c"], "abc", "", "abc"),  # complete together: the longest
        (["abcd", "bc"], "abcd", "a", "bc"),
        (["aab"], "aaab", "a", "aab"),  # a near miss that begins the match
        (["ab", "abc"], "xabc", "x", "ab"),
        (["é🙂"], "né🙂", "n", "é🙂"),
        ([], "anything", "anything", None),
    ],
)
def test_table(stops: list[str], text: str, shown: str, matched: str | None) -> None:
    matcher = StopMatcher(stops)
    assert matcher.push(text)[0] + matcher.flush() == shown
    assert matcher.matched == matched


def test_many_stops_and_a_long_text_take_linear_time() -> None:
    matcher = StopMatcher(["a" * n + "b" for n in range(1, 200)])
    text = "a" * 20_000
    assert matcher.push(text) == ("a" * (20_000 - 199), None)
    assert matcher.held == 199
    assert matcher.flush() == "a" * 199


@pytest.mark.parametrize("stops", [[""], ["a", ""], [None]])
def test_an_empty_stop_is_refused_by_name(stops: list[str]) -> None:
    with pytest.raises(RequestError, match=r"stop\[\d\]") as caught:
        StopMatcher(stops)
    assert caught.value.param == "stop"

"""Tokens to text: over random texts, splits, stops and banned strings, text and tokens stay in step."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from unspool.events import Token
from unspool.text.assembler import Assembler, Banned, MatchingAssembler, Stop, TextAssembler


class PieceTokenizer:
    """Token i stands for the i-th of some byte strings; what a real tokenizer is to the detokenizer."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.special_ids: frozenset[int] = frozenset()
        self.vocab_size = len(pieces)
        self.strips_leading_space = False

    def token_bytes(self, id: int) -> bytes:
        return self.pieces[id]


def run(assembler: Assembler, count: int) -> tuple[str, list[int], str | None, list[str]]:
    text, ids, shown = "", [], []
    for id in range(count):
        more, tokens, match = assembler.push(Token(id))
        text, ids = text + more, ids + [token.id for token in tokens]
        shown.append(more)
        if isinstance(match, Stop):
            return text, ids, match.text, shown
    more, tokens, match = assembler.flush()
    stop = match.text if isinstance(match, Stop) else None
    return text + more, ids + [token.id for token in tokens], stop, shown


texts = st.text(alphabet="ab→é😀", max_size=24)


@st.composite
def split_text(draw) -> list[bytes]:
    """A text's bytes cut anywhere, inside characters too."""
    data = draw(texts).encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=10)) | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(cuts)] or [b""]


@given(split_text(), st.lists(st.text(alphabet="ab→é", min_size=1, max_size=4), max_size=3))
def test_text_is_cut_at_the_first_stop_and_tokens_with_it(pieces: list[bytes], stops: list[str]) -> None:
    whole = b"".join(pieces).decode()
    ends = [whole.index(stop) + len(stop) for stop in stops if stop in whole]
    text, ids, matched, _ = run(MatchingAssembler(PieceTokenizer(pieces), stops=stops), len(pieces))
    if not ends:
        assert (text, ids, matched) == (whole, list(range(len(pieces))), None)
        return
    # The stop complete first, and of those the longest.
    first = min(ends)
    longest = max((s for s in stops if whole[:first].endswith(s)), key=len)
    assert matched == longest
    assert text == whole[: first - len(longest)]
    # Tokens that lie wholly behind the cut are dropped; those before it are there, in order.
    starts = [len(b"".join(pieces[:i]).decode(errors="ignore")) for i in range(len(pieces))]
    kept = [i for i, start in enumerate(starts) if start < len(text)]
    assert ids == kept[: len(ids)]
    assert len(kept) - len(ids) <= 1


@given(split_text())
def test_every_token_goes_out_once_in_order(pieces: list[bytes]) -> None:
    whole = b"".join(pieces).decode()
    tokenizer = PieceTokenizer(pieces)
    for assembler in (TextAssembler(tokenizer), MatchingAssembler(tokenizer, stops=["never in there"])):
        text, ids, _, shown = run(assembler, len(pieces))
        assert (text, ids) == (whole, list(range(len(pieces))))
        assert all("\ufffd" not in part for part in shown), "half a character was shown"


@given(split_text(), st.text(alphabet="ab→", min_size=1, max_size=3))
def test_a_banned_string_is_found_before_it_is_shown(pieces: list[bytes], banned: str) -> None:
    whole = b"".join(pieces).decode()
    assembler = MatchingAssembler(PieceTokenizer(pieces), banned=[banned])
    text = ""
    for id in range(len(pieces)):
        more, _, match = assembler.push(Token(id))
        if isinstance(match, Banned):
            assert match.start <= id
            start = whole.index(banned)
            assert whole[:start].startswith(text)
            before = b"".join(pieces[: match.start]).decode(errors="ignore")
            assert len(before) <= start, "going back must undo the banned string's first character"
            return
        text += more
    assert banned not in whole


def test_a_rewind_shows_nothing_twice() -> None:
    tokenizer = PieceTokenizer([b"x", b"a", b"a", b"c", b"b"])
    assembler = MatchingAssembler(tokenizer, banned=["ab", "aac"])
    assert [assembler.push(Token(i))[0] for i in (0, 1, 2)] == ["x", "", ""]
    assert assembler.push(Token(3)) == ("", (), Banned("aac", 1))
    assembler.rewind(1)
    assert assembler.push(Token(4))[0] == "b"
    assert assembler.push(Token(1))[0] == ""
    assert assembler.flush()[0] == "a"

"""Lines that end between words, on a small model of a terminal's screen."""

from __future__ import annotations

import itertools
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.cli import COMMANDS, main
from unspool.cli.wrapping import LineWrapper, fold, fold_columns, num_cells, pad

WORDS = st.lists(st.text("abcXYZ.,é", min_size=1, max_size=9), max_size=30)


def screen(written: str) -> list[str]:
    """What a terminal shows: of the sequences, erasing the end of a line is known."""
    lines = [""]
    for part in re.split(r"(\x1b\[\d+D\x1b\[K|\n)", written):
        if part == "\n":
            lines.append("")
        elif part.startswith("\x1b"):
            count = int(part[2 : part.index("D")])
            assert 0 < count < num_cells(lines[-1]), "a word that is moved does not begin the line"
            while count:
                count -= num_cells(lines[-1][-1])
                lines[-1] = lines[-1][:-1]
        else:
            lines[-1] += part
    return lines


def wrap(text: str, limit: int, pieces: int = 1) -> list[str]:
    wrapper = LineWrapper()
    return screen("".join(wrapper.feed(text[i : i + pieces], limit) for i in range(0, len(text), pieces)))


@given(WORDS, st.integers(10, 40), st.integers(1, 50))
def test_words_stay_whole_however_they_come(words: list[str], limit: int, pieces: int) -> None:
    lines = wrap(" ".join(words), limit, pieces)
    assert [word for line in lines for word in line.split()] == words
    assert all(num_cells(line) <= limit for line in lines)
    assert all(line for line in lines) or not words
    assert lines == wrap(" ".join(words), limit), "the pieces make no difference"
    for line, following in itertools.pairwise(lines):
        assert num_cells(line.rstrip() + " " + following.split()[0]) > limit, "no line ends early"


def test_the_texts_own_lines_stay() -> None:
    assert wrap("one two\n\n  three four", 9) == ["one two", "", "  three ", "four"]


def test_a_word_longer_than_a_line_is_broken() -> None:
    assert wrap("see https://example.org/long now", 10) == ["see ", "https://ex", "ample.org/", "long now"]


def test_code_between_fences_keeps_its_lines() -> None:
    text = "look at this\n```python\nvalue = function(argument)\n```\nand then this"
    assert wrap(text, 9) == ["look at ", "this", "```python", "value = function(argument)", "```", "and then ", "this"]


def test_scripts_without_blanks_are_broken_between_characters() -> None:
    assert wrap("日本語の文章です", 7) == ["日本語", "の文章", "です"]


@pytest.mark.parametrize(("text", "cells"), [("abc", 3), ("日本", 4), ("e\u0301", 1), ("🙂", 2), ("", 0)])
def test_num_cells(text: str, cells: int) -> None:
    assert num_cells(text) == cells
    assert num_cells(pad(text, 6)) == num_cells(pad(text, 6, right=True)) == 6


def test_fold() -> None:
    assert fold("a first line that is long\nand another", 12, "  ") == "a first line\n  that is\n  long\nand another"
    assert fold("  name      its meaning", 14, " " * 12) == "  name\n            its\n            meaning"
    assert fold("unbreakable", 4) == "unbreakable"
    assert fold("short", 40) == "short"


@pytest.mark.parametrize(
    ("line", "folded"),
    [
        ("  name  its meaning and more of it", "  name  its meaning\n        and more of\n        it"),
        ("a sentence of several words", "a sentence of\nseveral words"),
        ("  indented words of one column", "  indented words of\n  one column"),
        ("  a very long first column  and a second", "  a very long first\n      column  and a\n      second"),
    ],
)
def test_fold_columns(line: str, folded: str) -> None:
    assert fold_columns(line, 19) == folded


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_fits_the_terminal(
    arguments: list[str], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    long = [line for line in lines if len(line) >= columns and " " in line.strip()]
    assert not long, "only a word alone may be longer"


def test_an_error_is_folded_and_cannot_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["run", "hi", "--top-p", "1.5"]) == 2
    assert capsys.readouterr().err == "unspool: top_p is 1.5; allowed: above 0\nand up to 1\n"
    assert main(["./\x1b[2Jmodel.gguf"]) == 2
    assert "\x1b" not in capsys.readouterr().err

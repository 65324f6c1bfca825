"""Wraps lines between words, also for streamed text; and computes the width of a text in columns."""

from __future__ import annotations

import re

TAB = 8
FENCE = "```"
# Compiled where they are used: most starts wrap nothing.
_SECOND_COLUMN = r" *\S.*?  +(?=\S)"
_PIECE = r" *[^ ]+| +$"


def num_cells(text: str) -> int:
    """The width of a text on a terminal in columns: none for a combining mark, two for a wide character."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(character: str) -> int:
    if character.isascii():
        return 1
    import unicodedata

    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def pad(text: str, size: int, *, right: bool = False) -> str:
    """`text` padded with blanks to `size` columns."""
    blanks = " " * (size - num_cells(text))
    return blanks + text if right else text + blanks


def fold(text: str, limit: int, indent: str = "") -> str:
    """`text` in lines of at most `limit` columns; continuation lines begin with `indent`. Longer words are not
    broken."""
    lines = []
    for line in text.split("\n"):
        current = ""
        for piece in re.findall(_PIECE, line):
            if current.strip() and num_cells(current + piece) > limit:
                lines.append(current)
                current = indent + piece.lstrip(" ")
            else:
                current += piece
        lines.append(current)
    return "\n".join(lines)


def fold_columns(text: str, limit: int) -> str:
    """`fold` for lists and tables: a continuation line begins below the second column, or at the line's indentation if
    it has only one."""
    return "\n".join([fold(line, limit, " " * _hanging(line, limit)) for line in text.split("\n")])


def _hanging(line: str, limit: int) -> int:
    begin = len(line) - len(line.lstrip(" "))
    column = re.match(_SECOND_COLUMN, line)
    if column is None:
        return begin
    return column.end() if column.end() <= limit // 2 else begin + 4


class LineWrapper:
    """Wraps streamed text for a terminal: write the result of `feed` at once.

    A word that turns out not to fit is erased from the end of its line and written again on the next. Fenced code
    blocks keep their lines.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word = ""  # the one that the line ends with
        self._head = ""  # the beginning of the text's own line
        self._is_code = False

    def feed(self, text: str, limit: int) -> str:
        """`limit`: the columns to use, at most the terminal's width less one."""
        return "".join([self._next(character, limit) for character in text])

    def _next(self, character: str, limit: int) -> str:
        if character == "\n":
            self._is_code ^= self._head.lstrip().startswith(FENCE)
            self._begin_line("")
            self._head = ""
            return character
        if len(self._head) < limit:
            self._head += character
        if self._is_code:
            return character
        if character in " \t":
            return self._blank(character, limit)
        cells = _cells(character)
        if cells == 2:  # scripts without blanks may be broken before any character
            self._word = ""
        if self._column + cells <= limit:
            self._column += cells
            self._word += character
            return character
        return self._move_word(character, cells)

    def _begin_line(self, word: str) -> None:
        self._word, self._column = word, num_cells(word)

    def _blank(self, character: str, limit: int) -> str:
        self._word = ""
        column = self._column + 1 if character == " " else (self._column // TAB + 1) * TAB
        if column > limit:  # a line break replaces it
            self._begin_line("")
            return "\n"
        self._column = column
        return character

    def _move_word(self, character: str, cells: int) -> str:
        erased = num_cells(self._word)
        if erased in (0, self._column):  # the word begins here, or fills a whole line
            self._begin_line(character)
            return "\n" + character
        self._begin_line(self._word + character)
        return f"\033[{erased}D\033[K\n{self._word}"

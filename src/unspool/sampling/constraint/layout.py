"""How documents are laid out: which blanks and line breaks stand between their parts.

`model`: what models were trained to write. A list or an object stands in one line, with an optional blank after `:` and
`,` and inside its brackets, or has a line for each item, indented by two or by four blanks for each level. What stands
within one line stays in one line; one document is indented in one way.
`compact`: nothing. `flexible`: up to 64 blanks, tabs and line breaks between any two parts.

The parameter's low bits: 0 to 3 count the levels of indentation, 4 says that levels of two blanks are possible, 5 the
same for four. Neither: in one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from unspool.sampling.constraint.cfg import Alternative, Cfg, Symbol

Whitespace = Literal["model", "compact", "flexible"]
WHITESPACE: tuple[Whitespace, ...] = ("model", "compact", "flexible")
START = str(0b11_0000)
IN_LINE = "0"
LAYOUT_BITS = "bit_and(0xff)"  # what is handed on to the parts of a part
DEEPEST = 12
_BLANKS = r"[\x20\x0A\x0D\x09]{0,64}"
_LEVEL = "[0:4]"
_WIDTHS = {4: 2, 5: 4}  # of a level, by the bit that says that it is possible


class Layout:
    """The parts of objects and lists that are no values. `levels`: of indentation, at most."""

    def __init__(self, cfg: Cfg, whitespace: Whitespace, levels: int) -> None:
        self._cfg = cfg
        self._whitespace = whitespace
        self._levels = min(levels, DEEPEST)
        blanks = _BLANKS if whitespace == "flexible" else ""
        self.colon = cfg.terminal("/: ?/" if whitespace == "model" else f"/{blanks}:{blanks}/")
        self._around = {mark: cfg.terminal(self._bracket(mark, blanks)) for mark in "{}[]"}
        self._empty = {pair: cfg.terminal(rf"/\{pair[0]}{blanks}\{pair[1]}/") for pair in ("{}", "[]")}
        self.comma = cfg.terminal(f"/{blanks},{blanks}/")
        if whitespace == "model":
            self._blank = {mark: cfg.terminal(f'"{mark} "' if mark in "{[" else f'" {mark}"') for mark in "{}[]"}
            # One rule for each width. Where both are possible they must not share a rule, because llguidance completes
            # a rule for every parameter that it was begun with.
            self._lines = {bit: cfg.rule(list(self._levels_of(width))) for bit, width in _WIDTHS.items()}
            options = [Alternative((cfg.terminal("/, ?/"),), "is_zeros([4:6])")]
            for bit, line in self._lines.items():
                options.append(Alternative((self.comma, Symbol(line)), f"bit_set({bit})"))
            self.comma = Symbol(cfg.rule(options))

    @staticmethod
    def _bracket(mark: str, blanks: str) -> str:
        return f"/\\{mark}{blanks}/" if mark in "{[" else f"/{blanks}\\{mark}/"

    def _levels_of(self, width: int) -> Iterator[Alternative]:
        """A line break with its indentation, by level."""
        for level in range(self._levels + 1):
            yield Alternative((self._cfg.terminal(f"/\\n {{{level * width}}}/"),), f"eq({_LEVEL}, {level})")

    def container(self, name: str, brackets: str, body: str | None, *, may_be_empty: bool) -> None:
        """Define a rule: an object or a list around a body, which is never empty."""
        options = [Alternative((self._empty[brackets],))] if may_be_empty else []
        if body is not None:
            options += self._filled(brackets[0], brackets[1], body)
        self._cfg.define(name, options)

    def _filled(self, opens: str, closes: str, body: str) -> list[Alternative]:
        around, inside = self._around, Symbol(body, IN_LINE)
        options = [Alternative((around[opens], inside, around[closes]))]
        if self._whitespace != "model":
            return options
        options.append(Alternative((self._blank[opens], inside, self._blank[closes])))
        deeper = f"incr({_LEVEL})"
        for bit, line in self._lines.items():
            begin = (around[opens], Symbol(line, deeper), Symbol(body, deeper))
            block = self._cfg.rule([Alternative((*begin, Symbol(line), around[closes]))])
            room = f"and(bit_set({bit}), lt({_LEVEL}, {self._levels}))"
            options.append(Alternative((Symbol(block, f"clear_bit({9 - bit})"),), room))
        return options

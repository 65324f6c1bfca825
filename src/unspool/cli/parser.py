"""argparse, with our manners: whole flag names only, one-line errors, help that keeps its layout."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from unspool.cli.terminal import width
from unspool.cli.wrapping import fold_columns


class UsageError(Exception):
    """The command line itself is wrong."""


class Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        columns = min(width() - 1, 110)
        super().__init__(prog, max_help_position=30 if columns >= 70 else 8, width=columns)


def whole_number(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number") from None


def number(value: str) -> float:
    try:
        parsed = float(value)
    except ValueError:
        parsed = math.nan
    if not math.isfinite(parsed):
        raise argparse.ArgumentTypeError(f"{value!r} is not a number")
    return parsed


NUMBERS: dict[Callable[[str], Any], Callable[[str], Any]] = {int: whole_number, float: number}


class StoreOnce(argparse.Action):
    """An option with one value. Given twice, keeping the last in silence would hide a mistake."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given: set[str] = vars(namespace).setdefault("given_options", set())
        if option is not None and self.dest in given:
            raise argparse.ArgumentError(self, "given twice; it takes one value")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """`--debug` is known to every command and read in `unspool.cli`."""

    def __init__(self, command: str, usage: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"unspool {command}",
            usage=f"unspool {command} {usage}",
            description=description,
            epilog=epilog,
            formatter_class=Help,
            allow_abbrev=False,
            add_help=False,
        )
        for name in (None, "store"):
            self.register("action", name, StoreOnce)
        for kind, parse in NUMBERS.items():  # so that an error says what is wanted, and nan and inf are none
            self.register("type", kind, parse)

    def format_help(self) -> str:
        text = super().format_help()
        return fold_columns(text, width() - 1) if sys.stdout.isatty() else text

    def add_common(self) -> None:
        group = self.add_argument_group("help")
        group.add_argument("-h", "--help", action="help", help="show this and leave")
        group.add_argument("--debug", action="store_true", help="show the traceback of a failure")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

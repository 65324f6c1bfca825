"""argparse, with our manners: whole flag names only, one-line errors, help that keeps its layout."""

from __future__ import annotations

import argparse
import shutil
from typing import NoReturn


class UsageError(Exception):
    """The command line itself is wrong."""


class Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((100, 24)).columns, 110)
        super().__init__(prog, max_help_position=30, width=width)


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

    def add_common(self) -> None:
        group = self.add_argument_group("help")
        group.add_argument("-h", "--help", action="help", help="show this and leave")
        group.add_argument("--debug", action="store_true", help="show the traceback of a failure")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

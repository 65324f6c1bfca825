"""argparse with other conventions: full flag names only, one-line errors with advice, help that keeps its layout."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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


# Names of other programs for our options.
ELSEWHERE = {
    "--n": "--answers N is how many answers; -n N (--max-tokens) is how long one may be",
    "--temp": "it is --temperature here",
    "--repeat-penalty": "it is --repetition-penalty here",
    "--max-new-tokens": "it is --max-tokens (-n) here",
    "--n-predict": "it is --max-tokens (-n) here",
    "--num-predict": "it is --max-tokens (-n) here",
    "--ctx-size": "the context is the model's; --kv-tokens N makes the cache smaller",
    "--prompt": "the prompt is an argument, in quotes",
    "--verbose": "--debug shows the traceback of a failure",
}
NUMBERS: dict[Callable[[str], Any], Callable[[str], Any]] = {int: whole_number, float: number}


class StoreOnce(argparse.Action):
    """An option with one value. Giving it twice is an error."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given: set[str] = vars(namespace).setdefault("given_options", set())
        if option is not None and self.dest in given:
            raise argparse.ArgumentError(self, "given twice; it takes one value")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Every command accepts `--debug`, which `unspool.cli` reads."""

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
        for kind, parse in NUMBERS.items():  # so that an error names the expected type, and nan and inf are refused
            self.register("type", kind, parse)

    def format_help(self) -> str:
        text = super().format_help()
        return fold_columns(text, width() - 1) if sys.stdout.isatty() else text

    def add_common(self) -> None:
        group = self.add_argument_group("help")
        group.add_argument("-h", "--help", action="help", help="show this and leave")
        group.add_argument("--debug", action="store_true", help="show the traceback of a failure")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = sys.argv[1:] if args is None else list(args)
        names = self._option_string_actions
        for argument in given:  # `-top-p 0.9` would be `-t op-p`
            if re.fullmatch(r"-[a-z][a-z-]+(=.*)?", argument) and f"-{argument}".partition("=")[0] in names:
                self.error(f"{argument.partition('=')[0]} has one dash; write -{argument}")
        parsed, left = self.parse_known_args(given, namespace)
        if left:
            self.error(self._unknown(left))
        return parsed

    def _unknown(self, left: Sequence[str]) -> str:
        """The error for unknown arguments."""
        name = left[0].partition("=")[0]
        if not re.match("-.*[A-Za-z]", name):
            if any(action.dest == "prompt" for action in self._actions):
                return f"{name!r} is one argument too many; the prompt is one, in quotes"
            return f"{name!r} is one argument too many"
        if name in ELSEWHERE:
            return f"{name} is not an option; {ELSEWHERE[name]}"
        options = [one for one, action in self._option_string_actions.items() if action.help is not argparse.SUPPRESS]
        return f"{name} is not an option{_like(name, options)}"

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{_plain(message)} (see {self.prog} --help)")


def _like(name: str, options: Iterable[str]) -> str:
    """The options with the same beginning, else the nearest."""
    bodies = {option.lstrip("-"): option for option in options if option.startswith("--")}
    begun = [option for body, option in bodies.items() if body.startswith(name.lstrip("-"))][:4]
    if begun:
        return f"; did you mean {', '.join(begun[:-1])}{' or ' if len(begun) > 1 else ''}{begun[-1]}?"
    from difflib import get_close_matches

    close = get_close_matches(name.lstrip("-"), bodies, n=1, cutoff=0.7)
    return f"; did you mean {bodies[close[0]]}?" if close else ""


def _plain(message: str) -> str:
    """argparse's message in plain words."""
    message = re.sub(r"^argument (\S+): expected one argument$", r"\1 needs a value", message)
    message = re.sub(r"^the following arguments are required: (.*)$", r"\1 is missing", message)
    return message.removeprefix("argument ")


@contextmanager
def our_manners() -> Iterator[None]:
    """Apply the same error and help format to argparse parsers of other packages."""

    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (-[^\s=]+)", message)
        if unknown is not None:
            message = f"{unknown[1]} is not an option{_like(unknown[1], parser._option_string_actions)}"
        raise UsageError(f"{_plain(message)} (see {parser.prog} --help)")

    error_before, help_before = argparse.ArgumentParser.error, argparse.ArgumentParser.format_help

    def folded(parser: argparse.ArgumentParser) -> str:
        text = help_before(parser)
        return fold_columns(text, width() - 1) if sys.stdout.isatty() else text

    argparse.ArgumentParser.error = error  # type: ignore[method-assign,assignment]
    argparse.ArgumentParser.format_help = folded  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.error = error_before  # type: ignore[method-assign]
        argparse.ArgumentParser.format_help = help_before  # type: ignore[method-assign]

"""unspool completion: TAB completion for shells, derived from the commands' parsers."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

from unspool.cli.parser import Parser, UsageError
from unspool.records import record
from unspool.suggest import nearest

DESCRIPTION = """\
Print a script that completes commands, options, their values and the models that are here. The shell asks this program
at each TAB, so what it offers is always what the installed version takes."""
EPILOG = """\
for this user:
  echo 'eval "$(unspool completion bash)"' >> ~/.bashrc
  echo 'eval "$(unspool completion zsh)"' >> ~/.zshrc              after compinit
  unspool completion fish > ~/.config/fish/completions/unspool.fish"""
FILES = ":files"  # the first line of a reply where a file may be named
SCRIPTS = {
    "bash": """\
_unspool() {
    local IFS=$'\\n'
    COMPREPLY=($(unspool completion reply bash "${COMP_LINE:0:$COMP_POINT}" 2>/dev/null))
    if [[ "${COMPREPLY[0]}" == ":files" ]]; then
        unset 'COMPREPLY[0]'
        COMPREPLY=("${COMPREPLY[@]}")
        compopt -o default
    fi
}
complete -F _unspool unspool
""",
    "zsh": """\
#compdef unspool
_unspool() {
    local -a found
    found=("${(@f)$(unspool completion reply zsh "$LBUFFER" 2>/dev/null)}")
    if [[ "$found[1]" == ":files" ]]; then
        shift found
        _files
    fi
    (( $#found )) && _describe -V unspool found
}
compdef _unspool unspool
""",
    "fish": """\
function __unspool_complete
    set -l found (unspool completion reply fish (commandline -cp | string collect) 2>/dev/null)
    if test "$found[1]" = ":files"
        set -e found[1]
        __fish_complete_path (commandline -ct)
    end
    printf '%s\\n' $found
end
complete -c unspool -f -a '(__unspool_complete)'
""",
}


def make_parser() -> Parser:
    parser = Parser("completion", "bash | zsh | fish", DESCRIPTION, EPILOG)
    parser.add_argument("shell", metavar="SHELL", help=", ".join(SCRIPTS))
    parser.add_common()
    return parser


def main(argv: Sequence[str]) -> int:
    if len(argv) == 3 and argv[0] == "reply":
        print(reply(argv[1], argv[2]), end="")
        return 0
    shell = make_parser().parse_args(argv).shell
    if shell not in SCRIPTS:
        raise UsageError(f"{shell!r} is no shell that is known here{nearest(shell, SCRIPTS, ', '.join(SCRIPTS))}")
    print(SCRIPTS[shell], end="")
    return 0


@record
class Offer:
    """The possible completions at the cursor: texts with their meanings, and whether files are allowed."""

    texts: dict[str, str] = field(default_factory=dict)
    files: bool = False


def reply(shell: str, line: str) -> str:
    """The lines that a shell's script reads, for a command line up to the cursor."""
    words, current = split(line)
    try:
        offer = offered(words, current)
    except Exception:  # no messages during completion
        return ""
    texts = {text: about for text, about in offer.texts.items() if text.startswith(current)}
    lines = [FILES] if offer.files else []
    if shell == "bash":  # bash treats the text after a colon or an equals sign as a separate word
        cut = len(current) - len(re.split("[:=]", current)[-1])
        lines += [text[cut:] for text in texts]
    elif shell == "zsh":
        lines += [f"{text.replace(':', chr(92) + ':')}:{about}" if about else text for text, about in texts.items()]
    else:
        lines += [f"{text}\t{about}" if about else text for text, about in texts.items()]
    return "".join(f"{one}\n" for one in lines)


def split(line: str) -> tuple[list[str], str]:
    """The complete words of a command line, and the word at the cursor."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        words += lexer
    except ValueError:  # a quote that is still open
        return words, ""
    if not line or line[-1].isspace() or not words:
        return words, ""
    return words[:-1], words[-1]


def offered(words: Sequence[str], current: str) -> Offer:
    """The completions after some words; `current` is the beginning already typed."""
    from unspool.cli import COMMANDS

    if len(words) < 2 or words[1] == "help":
        return Offer({**COMMANDS, **({} if len(words) > 1 else {"--help": "", "--version": ""})})
    command, rest = words[1], list(words[2:])
    if command not in COMMANDS:
        return Offer()
    names = _names_of(command) if not rest else {}
    if names and not current.startswith("-"):
        return Offer(names, files=command == "eval")
    parser = parser_of(command, rest)
    if parser is None:
        return Offer()
    options = parser._option_string_actions
    if current.startswith("--") and "=" in current:
        name = current.partition("=")[0]
        offer = _values(options[name]) if name in options else Offer()
        return Offer({f"{name}={text}": about for text, about in offer.texts.items()}, offer.files)
    before = options.get(rest[-1]) if rest else None
    if before is not None and before.nargs != 0:
        return _values(before)
    if current.startswith("-"):
        return Offer({name: _about(action) for name, action in options.items() if action.help != argparse.SUPPRESS})
    return _positional(parser, rest)


def _names_of(command: str) -> dict[str, str]:
    """The subcommands of a command."""
    if command == "bench":
        from unspool.cli.bench import benchmarks

        return benchmarks()
    if command == "eval":
        from unspool.cli import eval as evaluation

        return dict.fromkeys(evaluation.COMMANDS, "")
    if command == "config":
        from unspool.cli import config

        return dict.fromkeys(config.ACTIONS, "")
    return dict.fromkeys(SCRIPTS, "") if command == "completion" else {}


class ParserFound(BaseException):
    """Carries a command's parser out of it before the command runs. Not an Exception, so that nothing catches it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(command: str, rest: Sequence[str] = ()) -> argparse.ArgumentParser | None:
    """The parser that a command would use for these arguments: the one that it makes itself."""
    from importlib import import_module

    from unspool.errors import UnspoolError

    with _caught_parsers():
        try:
            import_module(f"unspool.cli.{command}").main(list(rest))
        except ParserFound as found:
            return found.parser
        except (UsageError, UnspoolError, SystemExit):
            return None
    return None


@contextmanager
def _caught_parsers() -> Iterator[None]:
    def caught(parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Any:
        raise ParserFound(parser)

    base = argparse.ArgumentParser
    before = base.parse_known_args, base.print_help
    base.parse_known_args = caught  # type: ignore[method-assign,assignment]
    base.print_help = caught  # type: ignore[method-assign,assignment]
    own, Parser.parse_args = Parser.parse_args, caught  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        base.parse_known_args, base.print_help = before  # type: ignore[method-assign]
        Parser.parse_args = own  # type: ignore[method-assign]


def _positional(parser: argparse.ArgumentParser, rest: Sequence[str]) -> Offer:
    actions = [action for action in parser._actions if not action.option_strings]
    place = sum(not word.startswith("-") for word in rest)
    if not actions:
        return Offer()
    return _values(actions[min(place, len(actions) - 1)])


def _about(action: argparse.Action) -> str:
    """The first words of an option's help."""
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    first = re.split(r"[;:(.]", text, maxsplit=1)[0].strip()
    return first if len(first) <= 70 else f"{first[:69]}…"


MODEL_PLACES = ("MODEL",)
FILE_PLACES = ("FILE", "PATH", "REQUESTS", "RESULTS", "SCHEMA", "PROMPTS", "DIRECTORY")


def _values(action: argparse.Action) -> Offer:
    """The possible values of an option or of a positional argument."""
    known = _WORDS.get(action.dest)
    if known is not None:
        return Offer(dict.fromkeys(known(), ""), files=action.dest == "engine.speculate")
    if action.choices is not None:
        return Offer(dict.fromkeys(map(str, action.choices), ""))
    if action.metavar in MODEL_PLACES:
        return Offer(model_names(), files=True)
    if action.metavar in FILE_PLACES or action.type is Path:
        return Offer(files=True)
    if action.dest.startswith("engine."):
        from unspool.cli.flags import engine_words

        return Offer(dict.fromkeys(engine_words().get(action.dest.removeprefix("engine."), ()), ""))
    if action.dest.startswith("sampling."):
        from unspool.params.kinds import Word
        from unspool.params.registry import BY_NAME

        parameter = BY_NAME.get(action.dest.removeprefix("sampling."))
        words = parameter.kind.words if parameter is not None and isinstance(parameter.kind, Word) else ()
        return Offer(dict.fromkeys(words, ""))
    return Offer()


def model_names() -> dict[str, str]:
    """The models that are usable without a download, and the default one."""
    from unspool.cli.terminal import human_bytes
    from unspool.user_config import BUILT_IN, read_config
    from unspool.weights.installed import installed

    names = {BUILT_IN: "the default model"}
    names |= {name: each.model for each in read_config().models.values() for name in each.names}
    return names | {model.name: human_bytes(model.bytes) for model in installed()}


def _shapes() -> Iterable[str]:
    from unspool.models.shapes import SHAPES

    return (name for name in SHAPES if not name.startswith("tiny-"))


def _hardware() -> Iterable[str]:
    from unspool.hardware import HARDWARE

    return ("list", *HARDWARE)


def _orders() -> Iterable[str]:
    from unspool.params.order import PRESETS

    return PRESETS


_WORDS: dict[str, Callable[[], Iterable[str]]] = {
    "random": _shapes,
    "on": _hardware,
    "sampling.order": _orders,
    "engine.speculate": lambda: ("lookup", "auto", "early-exit", "mtp", "model:"),
    "sampling.beam.early_stopping": lambda: ("yes", "no", "never"),
    "log": lambda: ("text", "json", "off"),
    "shell": lambda: SCRIPTS,
    "models": model_names,  # of rm: no files
}

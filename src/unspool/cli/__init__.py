"""The command line: one file per command, imported only when it is used.

A command is a module with `main(argv) -> int`. It raises its errors; here each becomes one line on stderr and an exit
status: 2 for the user's mistakes, 1 for all others, 130 for Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

# In the order in which a new user needs them. A command must be listed here.
COMMANDS: dict[str, str] = {
    "run": "answer one prompt, streaming to stdout",
    "chat": "talk to a model in the terminal",
    "explain": "answer a prompt and say why each token was chosen",
    "serve": "serve OpenAI's API on a port",
    "inspect": "open a page that shows and steers how an answer comes about",
    "cluster": "serve from several machines, on a Ray cluster",
    "batch": "answer a file of requests, resumable",
    "plan": "what a model needs and how fast it can be, before it is loaded",
    "score": "how likely a model finds a text: perplexity, bits per byte, each token",
    "eval": "how well a model solves tasks, and what sampling changes",
    "tune": "find the sampling settings that do best on your prompts",
    "doctor": "find what makes a model misbehave",
    "pull": "fetch a model",
    "models": "list the models that are here",
    "show": "what a model's files say: metadata, template, defaults, tensors",
    "rm": "delete models that were fetched",
    "ps": "the servers that run here, and their models",
    "tokenize": "the tokens of a text or of a conversation",
    "config": "names, aliases and the default model",
    "completion": "completion of commands, options and models in bash, zsh and fish",
    "bench": "run a benchmark",
}
EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPT, EXIT_PIPE = 0, 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    if argv is None and sys.getfilesystemencoding() == "ascii":
        _restart_in_utf8()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPT
    except BrokenPipeError:
        return _leave_pipe()
    except SystemExit as leaving:  # argparse leaves so after --help
        return leaving.code if isinstance(leaving.code, int) else EXIT_OK
    except Exception as error:
        if "--debug" in arguments:
            raise
        return _report(error)
    return status


def _restart_in_utf8() -> NoReturn:
    """Restart Python in UTF-8 mode: a C locale without it can neither read nor print models' text."""
    import os

    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _dispatch(arguments: list[str]) -> int:
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help", "help"):
        if rest and rest[0] in COMMANDS:
            return _dispatch([rest[0], "--help"])
        from unspool.cli.terminal import show

        show(_help())
        return EXIT_OK
    if command in ("-V", "--version", "version"):
        from unspool.version import VERSION

        print(f"unspool {VERSION}")
        return EXIT_OK
    if command not in COMMANDS:
        raise _unknown(command)
    from importlib import import_module

    status: int = import_module(f"unspool.cli.{command}").main(rest)
    return status


def _help() -> str:
    commands = "\n".join(f"  {name:<11}{text}" for name, text in COMMANDS.items())
    return f"""unspool runs language models whose answers are reproducible, explainable and fast.

usage: unspool COMMAND [options]

{commands}

  unspool run "Why is the sky blue?"     the default model is fetched once, then it answers
  unspool run -m model.gguf --raw "Once upon a time" -n 64 --temperature 0.7 --seed 1
  unspool COMMAND --help                 everything a command can do
  unspool --version"""


def _unknown(command: str) -> Exception:
    from unspool.cli.parser import UsageError
    from unspool.suggest import nearest

    hint = nearest(command, COMMANDS, f"the commands are {', '.join(COMMANDS)}")
    if " " in command:
        hint = "; to answer a prompt: unspool run PROMPT"
    return UsageError(f"{command!r} is not a command{hint}")


def _report(error: Exception) -> int:
    """Print one line. Any other exception than unspool's own is a bug, and the line says how to see the traceback."""
    from unspool.cli.parser import UsageError
    from unspool.cli.terminal import harmless, note
    from unspool.errors import ModelError, RequestError, UnspoolError

    text = str(error)
    if isinstance(error, OSError):
        text = ("" if error.filename is None else f"{error.filename}: ") + (error.strerror or text)
    elif isinstance(error, MemoryError):
        advice = "unspool plan MODEL says what a model needs; --kv-tokens N makes the KV cache smaller"
        text = f"out of memory{f' ({error})' if text else ''}; {advice}"
    elif not isinstance(error, UsageError | UnspoolError):
        text = f"{type(error).__name__}: {error} (a defect; --debug shows where)"
    note(f"unspool: {harmless(text)}", style="")
    return EXIT_USAGE if isinstance(error, UsageError | RequestError | ModelError) else EXIT_FAILURE


def _leave_pipe() -> int:
    """The reader of stdout has closed it, as `| head` does. Prevents a second error when Python flushes at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_PIPE

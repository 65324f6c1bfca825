"""unspool chat: a conversation in the terminal."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from unspool.cli import flags
from unspool.cli.parser import Parser

if TYPE_CHECKING:
    from unspool.llm import LLM
    from unspool.models.checkpoint import Checkpoint

DESCRIPTION = '''\
Talk to a model. Ctrl-C stops an answer and not the program; Ctrl-D leaves; ↑ brings back what you typed. What you
paste is one message. A line that ends in \\ goes on in the next, and """ opens a text of several lines that """
closes. /help lists the commands. With a pipe for stdin each line is a turn.'''


def main(argv: Sequence[str]) -> int:
    parser = Parser("chat", "[options]", DESCRIPTION)
    group = parser.add_argument_group("the conversation")
    group.add_argument("--system", metavar="TEXT", help="the system message")
    group.add_argument("--load", metavar="FILE", help="go on with a conversation that /save wrote")
    group.add_argument("-q", "--quiet", action="store_true", help="no greeting, no summary lines")
    flags.add_engine_flags(parser)
    flags.add_sampling_flags(parser, is_interactive=True)
    parser.add_common()
    namespace = parser.parse_args(argv)
    values = flags.sampling_values(namespace)
    flags.sampling_params(values)

    from unspool.chat.template import start_renderer
    from unspool.cli.completion import model_names
    from unspool.cli.conversation import Conversation
    from unspool.cli.reading import Reader
    from unspool.cli.status import wanted
    from unspool.cli.talk import COMMANDS, Talk
    from unspool.weights.store import cache_dir

    start_renderer()  # while the weights load
    with ModelInUse(namespace) as model:
        talk = Talk(
            model,
            Conversation(system=namespace.system),
            values,
            quiet=namespace.quiet,
            wants_status=wanted(namespace),
        )
        if namespace.load is not None:
            talk.load(namespace.load)
        words = [*(f"/{name}" for name in COMMANDS), *(flag.key for flag in talk.flags)]
        reader = Reader(cache_dir() / "chat_history", lambda: [*words, *model_names()])
        if reader.is_terminal and not namespace.quiet:
            talk.greet()
        try:
            return talk.run(reader)
        finally:
            reader.close()
            sys.stdout.flush()


class ModelInUse:
    """The model of a chat. /model replaces it by another; both are never in memory at the same time."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self.llm = self._load()

    def exchange(self, name: str) -> None:
        """Continue with another model. Its files are checked before the old model is closed; if loading still fails,
        the old model is loaded again."""
        from unspool.cli.loading import locate
        from unspool.errors import ModelError
        from unspool.models.checkpoint import open_checkpoint

        _require_template(open_checkpoint(locate(name)))
        before = self._namespace.model, self._namespace.random
        self.llm.close()
        self._namespace.model, self._namespace.random = name, None
        try:
            self.llm = self._load()
        except BaseException as error:
            self._namespace.model, self._namespace.random = before
            self.llm = self._load()
            if isinstance(error, MemoryError):
                raise ModelError(f"{name} takes more memory than there is; {before[0]} is loaded again") from error
            raise

    def _load(self) -> LLM:
        from unspool.cli.loading import load

        llm, _ = load(self._namespace)
        _require_template(llm.checkpoint)
        return llm

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.llm.close()


def _require_template(checkpoint: Checkpoint) -> None:
    from unspool.errors import RequestError

    if checkpoint.chat_template is None:
        raise RequestError(
            f"{checkpoint.name} has no chat template, so it can only continue text; use `unspool run`", "model"
        )

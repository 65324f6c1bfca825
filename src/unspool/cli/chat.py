"""unspool chat: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from unspool.cli import flags
from unspool.cli.parser import Parser

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
    from unspool.cli.conversation import Conversation
    from unspool.cli.loading import load
    from unspool.cli.reading import Reader
    from unspool.cli.status import wanted
    from unspool.cli.talk import COMMANDS, Talk
    from unspool.errors import RequestError
    from unspool.weights.store import cache_dir

    start_renderer()  # while the weights load
    llm, _ = load(namespace)
    with llm:
        if llm.template is None:
            raise RequestError(
                f"{llm.checkpoint.name} has no chat template, so it can only continue text; use `unspool run`", "model"
            )
        conversation = Conversation(system=namespace.system)
        talk = Talk(llm, conversation, values, quiet=namespace.quiet, wants_status=wanted(namespace))
        if namespace.load is not None:
            talk.load(namespace.load)
        words = [*(f"/{name}" for name in COMMANDS), *(flag.key for flag in talk.flags)]
        reader = Reader(cache_dir() / "chat_history", words)
        if reader.is_terminal and not namespace.quiet:
            talk.greet()
        try:
            return talk.run(reader)
        finally:
            reader.close()
            sys.stdout.flush()

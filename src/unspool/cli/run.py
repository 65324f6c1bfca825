"""unspool run: answer one prompt. The answer streams to stdout; everything else goes to stderr."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.cli import flags
from unspool.cli.parser import Parser, UsageError
from unspool.cli.prompt import add_prompt_flags, as_asked, read_prompt

DESCRIPTION = """\
Answer one prompt, streaming to stdout. An instruct model gets it through its chat template; --raw continues the text
as it is. One line on stderr then shows the tokens, the time to the first one, the speed, and the seed."""
EPILOG = """\
examples:
  unspool run "Why is the sky blue?"
  git diff | unspool run --system "Write a commit message for this diff." -
  unspool run --raw "Once upon a time" -n 64 --temperature 0.8 --seed 1
  unspool run "Bob is 47." --json-schema '{"type":"object","properties":{"name":{"type":"string"},
    "age":{"type":"integer"}},"required":["name","age"]}'
  unspool run "Hello" --stop '\\n' --json | jq .timings

exit status: 0; 1 failure; 2 wrong usage, parameter or model; 130 stopped with Ctrl-C (what there was is printed)"""


def make_parser() -> Parser:
    parser = Parser("run", "[options] [PROMPT]", DESCRIPTION, EPILOG)
    add_prompt_flags(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one object: text, token ids, parameters, timings, …")
    output.add_argument("-q", "--quiet", action="store_true", help="no summary line")
    flags.add_engine_flags(parser)
    flags.add_sampling_flags(parser)
    parser.add_common()
    return parser


def main(argv: Sequence[str]) -> int:
    namespace = make_parser().parse_args(argv)
    values = flags.sampling_values(namespace)
    for key in ("logprobs", "logprobs_stage", "prompt_logprobs"):
        if key in values and not namespace.json:
            raise UsageError(f"--{key.replace('_', '-')} is shown with --json alone")
    params = flags.sampling_params(values)  # errors here are reported before a model is loaded
    prompt = read_prompt(namespace)

    from unspool.cli.answer import respond
    from unspool.cli.loading import load
    from unspool.cli.report import as_object, say
    from unspool.cli.status import wanted

    llm, seconds = load(namespace)
    with llm:
        asked = as_asked(llm, prompt, namespace)
        if namespace.json:
            answer = respond(llm, asked, params, wants_status=wanted(namespace))
            import json

            print(json.dumps(as_object(llm, answer.result, seconds), ensure_ascii=False))
        else:
            page = Page(params.n)
            answer = respond(llm, asked, params, page.show, wants_status=wanted(namespace))
            page.end()
            say(answer.result, quiet=namespace.quiet, used=None if namespace.quiet else llm.utilization(answer.result))
    return 130 if answer.interrupted else 0


class Page:
    """Streams the first answer; the others are printed after it, each under its number."""

    def __init__(self, num_choices: int) -> None:
        from unspool.cli.terminal import AnswerWriter

        self._write = AnswerWriter().write
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        if num_choices > 1:
            self._write("[1]\n")

    def show(self, choice: int, text: str) -> None:
        self._texts[choice].append(text)
        if choice == 0:
            self._write(text)

    def end(self) -> None:
        self._end_line(self._texts[0])
        for number, parts in enumerate(self._texts[1:], 2):
            self._write(f"[{number}]\n" + "".join(parts))
            self._end_line(parts)

    def _end_line(self, parts: list[str]) -> None:
        if not parts or not parts[-1].endswith("\n"):
            self._write("\n")



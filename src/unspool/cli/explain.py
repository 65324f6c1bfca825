"""unspool explain: answer a prompt and show why each token was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unspool.cli import flags
from unspool.cli.parser import Parser, UsageError
from unspool.cli.prompt import add_prompt_flags, as_asked, read_prompt

if TYPE_CHECKING:
    from unspool.cli.answer import Answer
    from unspool.llm import LLM

DESCRIPTION = """\
Answer a prompt and say why each token was chosen: how likely the model found it and which place it had, what each
sampling stage left over, the noise that decided, and what else could have come."""
EPILOG = """\
reading it:
  p, rank     the chosen token's probability and place in the model's own distribution
  entropy     how undecided the model was, in bits: 0 is certain, 1 a coin, 3.3 one of ten
  a stage     how many tokens it left, and how much of the probability they held
  draw        the best of logit + noise is chosen; the noise is a function of seed, position and token
  ahead of    the runner-up in the draw, and its score
  instead     the likeliest others, and the stage that took each out
A terminal too narrow for the table gets a paragraph for each token.

examples:
  unspool explain "Name a colour." -n 8 --temperature 0.8 --top-p 0.9 --seed 1
  unspool explain "Name a colour." -n 8 --json | jq '.steps[0].candidates[:2]'"""
DEFAULT_TOKENS = 24
MOST_ALTERNATIVES = 8  # that a trace follows


def main(argv: Sequence[str]) -> int:
    parser = Parser("explain", "[options] [PROMPT]", DESCRIPTION, EPILOG)
    add_prompt_flags(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one object; `steps` has every token's whole trace")
    output.add_argument("--alternatives", type=int, default=3, metavar="N", help="others to show, at most 8 (3)")
    output.add_argument("-q", "--quiet", action="store_true", help="no summary line")
    flags.add_engine_flags(parser)
    flags.add_sampling_flags(parser, is_interactive=True)
    parser.add_common()
    namespace = parser.parse_args(argv)
    values = flags.sampling_values(namespace)
    if not 0 <= namespace.alternatives <= MOST_ALTERNATIVES:
        raise UsageError(f"--alternatives is {namespace.alternatives}; allowed: 0 to {MOST_ALTERNATIVES}")
    is_cut = "max_tokens" not in values
    params = flags.sampling_params({"max_tokens": DEFAULT_TOKENS, **values}, trace=True)
    prompt = read_prompt(namespace)

    from unspool.cli.answer import respond
    from unspool.cli.loading import load
    from unspool.cli.report import say
    from unspool.cli.status import wanted
    from unspool.cli.terminal import note
    from unspool.errors import ContextLengthError

    llm, seconds = load(namespace)
    with llm:
        asked, status = as_asked(llm, prompt, namespace), wanted(namespace)
        try:
            answer = respond(llm, asked, params, wants_status=status)
        except ContextLengthError as error:
            if not is_cut or error.param != "max_tokens":
                raise
            # The context has room for fewer tokens than the default.
            answer = respond(llm, asked, replace(params, max_tokens=None), wants_status=status)
        if namespace.json:
            import json

            print(json.dumps(as_object(llm, answer, seconds), ensure_ascii=False))
        else:
            from unspool.cli.table import print_table

            print_table(llm, answer.result, namespace.alternatives)
            if is_cut and answer.result.finish_reason == "length":
                note(f"The first {DEFAULT_TOKENS} tokens; -n N shows more.")
            say(answer.result, quiet=namespace.quiet)
    return 130 if answer.interrupted else 0


def as_object(llm: LLM, answer: Answer, load_seconds: float) -> dict[str, Any]:
    """The answer as in `run --json`, and under `steps` each token's trace with the texts of its tokens."""
    from unspool.cli import report
    from unspool.params.resolve import jsonable

    steps = []
    for token in answer.result.tokens:
        step = jsonable(token.trace)
        steps.append({"text": report.text_of(llm, token.id), **_with_texts(llm, step)})
    return report.as_object(llm, answer.result, load_seconds) | {"steps": steps}


def _with_texts(llm: LLM, step: dict[str, Any]) -> dict[str, Any]:
    from unspool.cli.report import text_of

    alternatives = [
        {"token": token, "text": text_of(llm, token), "probability": probability}
        for token, probability in step["alternatives"]
    ]
    candidates = [{**each, "text": text_of(llm, each["token"])} for each in step["candidates"]]
    return {**step, "alternatives": alternatives, "candidates": candidates}

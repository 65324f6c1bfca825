"""unspool score: how likely a model finds a text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.cli import flags
from unspool.cli.parser import Parser, UsageError

if TYPE_CHECKING:
    from unspool.evaluation.scoring import Score
    from unspool.llm import LLM

DESCRIPTION = """\
How likely a model finds a text: perplexity, bits per byte and, if asked, every token. A text that is longer than a
window is read in windows that overlap: each token is scored once, with at least --window less --stride tokens before
it. The logprobs are bit for bit those that generating the same tokens would have given."""
EPILOG = """\
examples:
  unspool score book.txt
  unspool score book.txt --window 4096 --stride 512
  echo "The capital of France is Paris." | unspool score - --tokens
  unspool score book.txt --json --top 3 | jq '.token_table[:2]'

exit status: 0; 1 failure; 2 wrong usage or model; 130 stopped with Ctrl-C (what was scored is shown)"""
STOPPED = 130


def main(argv: Sequence[str]) -> int:
    namespace = make_parser().parse_args(argv)
    if namespace.limit is not None and namespace.limit < 2:
        raise UsageError(f"--limit is {namespace.limit}; allowed: 2 or more")
    if not 0 <= namespace.top <= 20:
        raise UsageError(f"--top is {namespace.top}; allowed: 0 to 20")
    text = read_text(namespace.file)

    from unspool.cli.loading import load
    from unspool.cli.status import Status, bar, wanted
    from unspool.evaluation.scoring import Score, score_tokens

    llm, _ = load(namespace)
    with llm:
        tokens = llm.encode(text)[: namespace.limit]
        if len(tokens) < 2:
            few = f"{namespace.file} has {len(tokens)} tokens"
            raise UsageError(f"{few}; two are needed, for nothing predicts the first")
        score, interrupted = Score(len(tokens)), False
        parts = score_tokens(llm, tokens, window=namespace.window, stride=namespace.stride, top=namespace.top)

        def progress() -> str:
            """The progress, including windows that are computed but not scored yet."""
            read = sum(request.num_computed for request in list(llm.engine.scheduler.running))
            done = min(len(tokens), len(score.tokens) + read)
            return bar("scoring", done / len(tokens), f"{done:,} of {len(tokens):,} tokens")

        with Status(progress, wanted(namespace)):
            try:
                for part in parts:
                    score = part
            except KeyboardInterrupt:
                interrupted = True
        report(llm, score, namespace, interrupted=interrupted)
    return STOPPED if interrupted else 0


def make_parser() -> Parser:
    parser = Parser("score", "FILE [options]", DESCRIPTION, EPILOG)
    parser.add_argument("file", metavar="FILE", help="a text in UTF-8; -: standard input")
    parser.add_argument("--window", type=int, metavar="N", help="tokens read together (2048, or the context)")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens that a window scores (half a window)")
    parser.add_argument("--limit", type=int, metavar="N", help="score the first N tokens alone")
    output = parser.add_argument_group("output")
    output.add_argument("--tokens", action="store_true", help="a table with a line for each token")
    output.add_argument("--top", type=int, default=0, metavar="N", help="and the N likeliest tokens there")
    output.add_argument("--json", action="store_true", help="one object; with --tokens or --top every token too")
    output.add_argument("-q", "--quiet", action="store_true", help="no progress")
    flags.add_engine_flags(parser)
    parser.add_common()
    return parser


def read_text(file: str) -> str:
    """The text of a file or of standard input, without a UTF-8 byte order mark."""
    name = "standard input" if file == "-" else file
    data = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8: byte {error.start:,} is 0x{data[error.start]:02x}") from None


def as_object(llm: LLM, score: Score, *, table: bool, interrupted: bool) -> dict[str, Any]:
    """The object of docs/schemas/score.json."""
    out = {"model": llm.checkpoint.name, "kernels": llm.engine.ops.kernel_set, **score.as_dict()}
    out["interrupted"] = interrupted
    return out | ({"token_table": [token.as_dict() for token in score.tokens]} if table else {})


def report(llm: LLM, score: Score, namespace: Any, *, interrupted: bool) -> None:
    wants_table = namespace.tokens or namespace.top > 0
    if namespace.json:
        import json

        print(json.dumps(as_object(llm, score, table=wants_table, interrupted=interrupted), ensure_ascii=False))
        return
    if wants_table:
        print_tokens(llm, score)
    if score.perplexity is None or score.bits_per_byte is None:
        print("nothing was scored")
        return
    error = "" if score.perplexity_error is None else f" ± {score.perplexity_error:.3g}"
    print(
        f"{llm.checkpoint.name}: perplexity {score.perplexity:.4f}{error}, {score.bits_per_byte:.4f} bits per byte; "
        f"{len(score.tokens):,} of {score.num_tokens:,} tokens, {score.nbytes:,} bytes"
    )


def print_tokens(llm: LLM, score: Score) -> None:
    import math

    from unspool.cli.terminal import harmless

    print(f"{'position':>8} {'id':>7} {'logprob':>9} {'p':>7} {'bits':>7} {'rank':>7}  token")
    for token in score.tokens:
        best = "".join(
            f"  {harmless(repr(llm.tokenizer.token_text(id)))} {math.exp(logprob):.3f}" for id, logprob in token.top
        )
        print(
            f"{token.position:>8} {token.id:>7} {token.logprob:>9.4f} {math.exp(token.logprob):>7.4f} "
            f"{-token.logprob / math.log(2):>7.2f} {token.rank or 0:>7}  {harmless(repr(token.text))}{best}"
        )

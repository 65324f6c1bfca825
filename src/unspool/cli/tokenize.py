"""unspool tokenize: the tokens of a text or of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from unspool.cli import flags
from unspool.cli.parser import Parser, UsageError
from unspool.cli.prompt import as_asked, read_prompt
from unspool.records import record

if TYPE_CHECKING:
    from unspool.llm import TextModel

DESCRIPTION = """\
Show how a model cuts a text into tokens: the ids, and the piece of text that each stands for. No weights are loaded.
A text is taken as `unspool run --raw` takes it, with BOS where the model wants it; --chat shows the prompt that the
chat template makes of a message."""
EPILOG = """\
examples:
  unspool tokenize "The sea is"
  unspool tokenize --chat "Why is the sky blue?" --system "Be brief."
  unspool tokenize --count - < book.txt
  unspool tokenize --decode 504 3649 314
  unspool tokenize "The sea" --json | jq -c '.tokens[] | [.id, .start, .end]'

start and end count characters of the text that the tokens decode to. A character that several tokens share belongs to
the one that completes it; the others are shown as their bytes."""


@record(frozen=True)
class Piece:
    id: int
    text: str  # the text that the token adds: "" until a character is complete
    start: int
    end: int
    bytes: str  # in hexadecimal
    is_control: bool


def make_parser() -> Parser:
    parser = Parser("tokenize", "[options] [TEXT]", DESCRIPTION, EPILOG)
    parser.add_argument("prompt", metavar="TEXT", nargs="?", help="the text; - (or nothing, with a pipe) reads stdin")
    parser.add_argument("--chat", action="store_true", help="the text is a message of the user's")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before it")
    parser.add_argument("--decode", nargs="+", metavar="ID", type=int, help="the text of token ids instead")
    output = parser.add_argument_group("output")
    output.add_argument("--ids", action="store_true", help="the ids alone, in one line")
    output.add_argument("--count", action="store_true", help="how many tokens, alone")
    output.add_argument("--json", action="store_true", help="one object: model, count, text, tokens")
    flags.add_model_flag(parser)
    parser.add_common()
    return parser


def main(argv: Sequence[str]) -> int:
    namespace = make_parser().parse_args(argv)
    if namespace.decode is not None and namespace.prompt is not None:
        raise UsageError("--decode and a text are both given; one is made of the other")
    if namespace.system is not None and not namespace.chat:
        raise UsageError("--system is a message of a conversation; it goes with --chat")
    namespace.raw = not namespace.chat
    text = None if namespace.decode is not None else read_prompt(namespace, 'unspool tokenize "The sea is"')

    from unspool.cli.loading import locate
    from unspool.cli.terminal import harmless
    from unspool.llm import TextModel
    from unspool.models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(locate(namespace.model))
    model = TextModel(checkpoint, checkpoint.tokenizer())
    ids = _checked(namespace.decode, model) if text is None else _ids(model, as_asked(model, text, namespace))
    if namespace.count:
        print(len(ids))
    elif namespace.ids:
        print(*ids)
    elif namespace.json:
        import json

        found = pieces(model, ids)
        summary = {"model": checkpoint.name, "count": len(ids), "text": "".join(piece.text for piece in found)}
        print(json.dumps({**summary, "tokens": [asdict(piece) for piece in found]}, ensure_ascii=False))
    elif text is None:
        print(harmless(model.tokenizer.decode(ids, skip_special=False)))
    else:
        print_pieces(pieces(model, ids))
    return 0


def _ids(model: TextModel, asked: object) -> list[int]:
    if isinstance(asked, str):
        return model.encode(asked)
    return model.render(asked)  # type: ignore[arg-type]  # a conversation


def _checked(ids: Sequence[int], model: TextModel) -> list[int]:
    size = model.tokenizer.vocab_size
    for id in ids:
        if not 0 <= id < size:
            raise UsageError(f"there is no token {id}; the vocabulary has {size:,}, from 0")
    return list(ids)


def pieces(model: TextModel, ids: Sequence[int]) -> list[Piece]:
    """Each token with its position in the decoded text, which includes control tokens."""
    from unspool.text.detokenizer import Detokenizer

    tokenizer = model.tokenizer
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    found, at = [], 0
    for place, id in enumerate(ids):
        text = detokenizer.push(id)
        if place == len(ids) - 1:
            text += detokenizer.flush()
        found.append(Piece(id, text, at, at + len(text), tokenizer.token_bytes(id).hex(), id in tokenizer.special_ids))
        at += len(text)
    return found


def print_pieces(found: Sequence[Piece]) -> None:
    import sys

    from unspool.cli.terminal import harmless, styled

    width = max([len("id"), *(len(str(piece.id)) for piece in found)])
    places = max([len("place"), *(len(f"{piece.start}-{piece.end}") for piece in found)])
    print(styled(f"{'id':>{width}}  {'place':<{places}}  piece", "dim", sys.stdout))
    for piece in found:
        shown = repr(piece.text) if piece.text else bytes.fromhex(piece.bytes).hex(" ")
        style = "cyan" if piece.is_control else "" if piece.text else "dim"
        place = f"{piece.start}-{piece.end}"
        print(f"{piece.id:>{width}}  {place:<{places}}  {styled(harmless(shown), style, sys.stdout)}")
    print(styled(f"{len(found):,} tokens", "dim", sys.stdout))

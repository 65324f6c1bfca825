"""Parses an answer's text and tokens into a message while they stream: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from unspool.chat.parts import Arguments, Begin, Content, Part, Reasoning
from unspool.events import Token
from unspool.records import record
from unspool.text.detokenizer import Detokenizer

if TYPE_CHECKING:  # answers to raw prompts need none of these
    from unspool.chat.call_formats import CallFormat
    from unspool.chat.call_parser import CallParser
    from unspool.chat.harmony import HarmonyParser
    from unspool.chat.reasoning import AnswerParser, ReasoningFormat, ReasoningParser
    from unspool.text.tokenizer import Tokenizer


BEFORE_ANSWER = ("start", "reasoning")  # states of a parser


@record(slots=True)
class ToolCall:
    """A call that the model wrote; `arguments` is its JSON text."""

    id: str
    name: str
    arguments: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name. Raises a ParseError if the answer was cut short within them."""
        import json

        from unspool.errors import ParseError

        try:
            found = json.loads(self.arguments)
        except ValueError as error:
            raise ParseError(f"the arguments of {self.name} are no whole JSON: {error}") from error
        if not isinstance(found, dict):
            raise ParseError(f"the arguments of {self.name} are no object: {self.arguments:.200}")
        return found


@record(frozen=True)
class AnswerSyntax:
    """How reasoning and calls are found in the answers to one request."""

    format: CallFormat | None  # of calls; None: the answer may make none
    names: frozenset[str] = frozenset()  # of the functions that may be called
    parallel: bool = True  # else an answer ends after its first call
    marks: Mapping[int, str] = field(default_factory=dict)  # control tokens of the formats, which have no text
    reasoning: ReasoningFormat | None = None
    begins: str = ""  # the part of the answer that the prompt already contains
    shows_special: bool = False  # control tokens have text
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the functions' arguments

    def new_call_id(self) -> str:
        from unspool.chat.call_formats import GENERIC

        return (self.format or GENERIC).new_call_id()

    def parser(self) -> AnswerParser | None:
        from unspool.chat.call_parser import CallParser

        calls = None if self.format is None else CallParser(self.format, self.names, self.schemas)
        return calls if self.reasoning is None else reasoning_parser(self.reasoning, calls, self.names, self.begins)


def reasoning_parser(
    format: ReasoningFormat, calls: CallParser | None = None, names: Collection[str] = (), begins: str = ""
) -> ReasoningParser | HarmonyParser:
    """A parser of answers that begin with reasoning in this format."""
    from unspool.chat.harmony import HarmonyParser
    from unspool.chat.reasoning import HARMONY, ReasoningParser

    return HarmonyParser(names, begins) if format is HARMONY else ReasoningParser(format, calls, begins)


class MarkRestorer:
    """Puts the control tokens that surround reasoning and calls, which have no text, back into the text.

    A token's text may arrive before the token, because a token is passed on when all of its text is out. So a position
    in the text is found by decoding all tokens before it.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[int, str]) -> None:
        self._marks = marks
        self._detokenizer = Detokenizer(tokenizer)
        self._num_given = 0  # characters of text so far
        self._num_decoded = 0  # characters that the tokens so far decode to

    def restore(self, text: str, tokens: Sequence[Token]) -> str:
        """The text with the marks among its tokens."""
        places: list[tuple[int, str]] = []
        for token in tokens:
            mark = self._marks.get(token.id)
            if mark is not None:
                places.append((self._num_decoded - self._num_given, mark))
            self._num_decoded += len(self._detokenizer.push(token.id))
        self._num_given += len(text)
        for place, mark in reversed(places):
            at = max(0, place)
            text = text[:at] + mark + text[at:]
        return text


class TokenSplitter:
    """Splits text at the ends of tokens: drafts change how many arrive at once, and this must not change the answer."""

    def __init__(self, tokenizer: Tokenizer, *, shows_special: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=not shows_special)
        self._num_given = self._num_decoded = 0  # characters, of the texts and of the tokens so far

    def split(self, text: str, tokens: Sequence[Token]) -> list[tuple[str, tuple[Token, ...]]]:
        """A piece for each token; text of later tokens goes with the last piece."""
        pieces: list[tuple[str, tuple[Token, ...]]] = []
        start = 0
        for token in tokens[:-1]:
            self._num_decoded += len(self._detokenizer.push(token.id))
            end = max(start, min(len(text), self._num_decoded - self._num_given))
            pieces.append((text[start:end], (token,)))
            start = end
        for token in tokens[-1:]:
            self._num_decoded += len(self._detokenizer.push(token.id))
        pieces.append((text[start:], tuple(tokens[-1:])))
        self._num_given += len(text)
        return pieces


class Message:
    """One answer while it grows. Without a `syntax`, all of it is content."""

    def __init__(self, tokenizer: Tokenizer | None = None, syntax: AnswerSyntax | None = None) -> None:
        self.calls: list[ToolCall] = []
        self._written: list[str] = []
        self._syntax = syntax
        self._parser = None if syntax is None else syntax.parser()
        self._marks: MarkRestorer | None = None
        if syntax is not None and syntax.marks and tokenizer is not None:
            self._marks = MarkRestorer(tokenizer, syntax.marks)
        self._splitter: TokenSplitter | None = None
        if syntax is not None and not syntax.parallel and tokenizer is not None:
            self._splitter = TokenSplitter(tokenizer, shows_special=syntax.shows_special)
        self._pieces: list[list[str] | ToolCall] = []  # in the order in which they came
        self._reasoning: list[str] = []
        self._num_before_answer = 0  # tokens that came before the answer proper

    @property
    def text(self) -> str:
        """Everything that the model wrote, including calls."""
        return self.content if self._parser is None else "".join(self._written)

    @property
    def reasoning(self) -> str:
        """The text that the model wrote before its answer."""
        return "".join(self._reasoning)

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of reasoning tokens, including marks."""
        return self._num_before_answer if self._reasoning else 0

    @property
    def content(self) -> str:
        """The text outside reasoning and calls."""
        return "".join("".join(piece) for piece in self._pieces if isinstance(piece, list))

    @property
    def pieces(self) -> list[str | ToolCall]:
        """Content and calls, in the order in which the model wrote them."""
        return ["".join(piece) if isinstance(piece, list) else piece for piece in self._pieces]

    @property
    def is_full(self) -> bool:
        """Whether the answer has one call and the request allows only one: the rest is not needed."""
        if self._parser is None or self._syntax is None or self._syntax.parallel:
            return False
        return self._parser.num_calls > 0  # complete ones: another may have begun in the same piece of text

    def take(self, text: str, tokens: Sequence[Token]) -> tuple[Sequence[Part], Sequence[Token]]:
        """Add text and its tokens, up to the token that makes the message full; returns the new parts and the tokens
        used."""
        if self._splitter is None:
            return self.push(text, tokens), tokens
        parts: list[Part] = []
        taken: list[Token] = []
        for piece, its in self._splitter.split(text, tokens):
            if self.is_full:
                break
            parts += self.push(piece, its)
            taken += its
        return parts, taken

    def push(self, text: str, tokens: Sequence[Token] = ()) -> Sequence[Part]:
        """Add text and its tokens; returns the new parts."""
        if self._parser is None:
            parts: Sequence[Part] = [Content(text)] if text else ()
        elif self.is_full:
            return ()
        else:
            self._written.append(text)
            marked = text if self._marks is None else self._marks.restore(text, tokens)
            if self._parser.state in BEFORE_ANSWER:
                self._num_before_answer += len(tokens)
            parts = self._parser.push(marked)
            if self.is_full:
                parts = [part for part in parts if isinstance(part, Content | Reasoning) or part.index == 0]
        self._add(parts)
        return parts

    def flush(self) -> Sequence[Part]:
        """The answer has ended: returns the text that was held back."""
        if self._parser is None or self.is_full:
            return ()
        parts = self._parser.flush()
        self._add(parts)
        return parts

    def _add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, Content):
                last = self._pieces[-1] if self._pieces else None
                if isinstance(last, list):
                    last.append(part.text)
                else:
                    self._pieces.append([part.text])
            elif isinstance(part, Reasoning):
                self._reasoning.append(part.text)
            elif isinstance(part, Begin):
                assert self._syntax is not None
                call = ToolCall(self._syntax.new_call_id(), part.name)
                self.calls.append(call)
                self._pieces.append(call)
            elif isinstance(part, Arguments):
                self.calls[part.index].arguments += part.text

"""One continuation of a prompt: its request in the scheduler, its sampler, its text, its clock.

A user's request has one branch, or n of them; the engine's group ties them together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unspool.engine.request import Request
from unspool.events import FinishReason, Timings, Token, Usage, plain_token
from unspool.params import RepetitionDetector, ResolvedParams
from unspool.text.assembler import Assembler, Piece, PlainAssembler

if TYPE_CHECKING:
    from unspool.sampling.pipeline import Sampler


@dataclass
class Clock:
    """When things happened to a branch, in seconds of a monotonic clock."""

    arrived: float
    started: float | None = None  # first planned
    first_token: float | None = None
    last_token: float | None = None

    def tick(self, now: float) -> None:
        """A token came."""
        self.last_token = now
        if self.first_token is None:
            self.first_token = now

    def timings(self, now: float, num_tokens: int) -> Timings:
        started = self.started if self.started is not None else now
        first = self.first_token if self.first_token is not None else now
        decode = (self.last_token or first) - first
        return Timings(
            queue=started - self.arrived,
            prefill=first - started,
            decode=decode,
            total=now - self.arrived,
            first_token=self.first_token - self.arrived if self.first_token is not None else None,
            tokens_per_second=(num_tokens - 1) / decode if num_tokens > 1 and decode > 0 else None,
        )


@dataclass(frozen=True, slots=True)
class Ending:
    reason: FinishReason
    stop: str | int | None = None


@dataclass
class Branch:
    request: Request
    choice: int
    params: ResolvedParams
    sampler: Sampler
    assembler: Assembler | PlainAssembler | None  # None: token ids alone, for a model without a tokenizer
    clock: Clock
    end_ids: frozenset[int]
    max_output: int  # tokens: what the request asks for and the context has room for
    speculate: str | None = None  # the drafter that guesses for it
    on_device: bool = False  # its tokens can be chosen by the device alone
    draws_in_turn: bool = False  # each after the one before: penalties count it
    has_begun: bool = False  # is, or was, in the scheduler
    has_ended: bool = False
    output: list[int] = field(default_factory=list)
    num_given: int = 0  # tokens handed to whoever asked
    logprob_sum: float = 0.0  # of those
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last_ids = self.end_ids | set(self.params.stop_token_ids)
        # Logprobs are asked for, or answers are ranked by them.
        self.is_told = self.params.logprobs is not None or self.params.best_of > self.params.n
        # Nobody asks more of a token than its text, and nothing but a token's id can end it.
        is_watched = (
            self.sampler.constraint is not None or self.params.repetition_detector is not None or self.params.trace
        )
        looks_for = isinstance(self.assembler, Assembler)
        self.is_plain = not (self.is_told or is_watched or looks_for or self.speculate is not None)

    def advance(self, token: Token) -> tuple[Piece, Ending | None]:
        """Take a chosen token in: the text that is now safe to show, and why the answer ends here, if it does.

        An end token wins over the length, for it is what the model meant; a stop string wins over both, for it cuts.
        """
        self.output.append(token.id)
        is_stop_token = token.id in self.params.stop_token_ids
        if self.assembler is None:
            piece = Piece("", (token,))
        else:
            piece = self.assembler.push(token, show=not is_stop_token or self.params.include_stop_str)
        if piece.banned is not None:
            return piece, None
        ending = None
        if piece.stop is not None:
            ending = Ending("stop", piece.stop)
        elif is_stop_token:
            ending = Ending("stop", token.id)
        elif token.id in self.end_ids:
            ending = Ending("eos", token.id)
        elif self.sampler.constraint is not None and self.sampler.constraint.is_finished:
            ending = Ending("constraint")  # nothing but an end could follow: the answer is whole, also at its length
        elif len(self.output) >= self.max_output:
            ending = Ending("length")
        elif self.params.repetition_detector and is_repeating(self.output, self.params.repetition_detector):
            ending = Ending("repetition")
        if ending is not None and piece.stop is None:
            piece, ending = self._flush(piece, ending)
        self.give(piece)
        return piece, ending

    def advance_plainly(self, id: int) -> tuple[str, tuple[Token, ...]] | None:
        """`advance` for most tokens of most answers: the text and the tokens that go out. None, and nothing happened,
        where there is more to it."""
        if not self.is_plain or id in self.last_ids or len(self.output) + 1 >= self.max_output:
            return None
        self.output.append(id)
        token = plain_token(id)
        if isinstance(self.assembler, PlainAssembler):
            text, tokens = self.assembler.next(token)
        else:
            text, tokens = "", (token,)
        self.num_given += len(tokens)
        return text, tokens

    def flush(self) -> Piece:
        """The end from outside (an abort, a deadline): what is held goes out."""
        piece, _ = self._flush(Piece(), Ending("abort"))
        self.give(piece)
        return piece

    def _flush(self, piece: Piece, ending: Ending) -> tuple[Piece, Ending]:
        if self.assembler is None:
            return piece, ending
        last = self.assembler.flush()
        if last.stop is not None:
            ending = Ending("stop", last.stop)
        return Piece(piece.text + last.text, piece.tokens + last.tokens), ending

    def give(self, piece: Piece) -> None:
        self.num_given += len(piece.tokens)
        for token in piece.tokens:
            if token.logprob is not None:
                self.logprob_sum += token.logprob

    def rewind(self, num_output: int) -> None:
        """Take back the output after its first `num_output` tokens, none of which was given."""
        del self.output[num_output:]
        self.sampler.rewind(num_output)
        if self.assembler is not None:
            assert isinstance(self.assembler, Assembler), "nothing is banned where nothing is looked for"
            self.assembler.rewind(num_output)

    def usage(self) -> Usage:
        return Usage(self.request.num_prompt, self.num_given, self.request.num_cached)


def is_repeating(output: list[int], detector: RepetitionDetector) -> bool:
    """Whether the output ends with some cycle of at most `period` tokens, `repeats` times over."""
    for period in range(1, detector.period + 1):
        length = period * detector.repeats
        if len(output) < length:
            return False
        if output[-length:-period] == output[-length + period :]:
            return True
    return False

"""One continuation of a prompt: its request in the scheduler, its sampler, its text, its clock.

A user's request has one branch, or n of them; the engine's group ties them together.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from unspool.engine.outcome import Ending, Failure, Outcome, Rewind
from unspool.engine.request import Request
from unspool.events import StepWork, Timings, Token, Usage
from unspool.params import RepetitionDetector, ResolvedParams
from unspool.plan import Work
from unspool.records import record
from unspool.text.assembler import Assembler, Banned, Stop

if TYPE_CHECKING:
    from unspool.engine.output import StepOutput
    from unspool.engine.steps import StepMeter
    from unspool.engine.stop_rules import StopRules
    from unspool.sampling.pipeline import Sampler


@record
class Clock:
    """When things happened to a branch, in seconds of a monotonic clock."""

    arrived: float
    started: float | None = None  # first planned
    first_token: float | None = None
    last_token: float | None = None
    meter: StepMeter | None = None  # of the engine's steps, from the start on
    flops_before: float = 0.0  # what it counted before the first step,
    flops_to_first: float = 0.0  # at the first token
    bytes_to_first: float = 0.0

    def start(self, now: float, meter: StepMeter) -> None:
        self.started, self.meter, self.flops_before = now, meter, meter.flops

    def follow(self, leader: Clock) -> None:
        """Copy the times of the branch that this one was forked from."""
        self.started, self.meter, self.flops_before = leader.started, leader.meter, leader.flops_before

    def tick(self, now: float) -> None:
        """Note the time of new tokens."""
        self.last_token = now
        if self.first_token is None:
            self.first_token = now
            if self.meter is not None:
                self.flops_to_first, self.bytes_to_first = self.meter.flops, self.meter.num_bytes

    def work(self) -> StepWork | None:
        """What the engine's steps computed up to now; None: there is no token yet."""
        if self.meter is None or self.first_token is None:
            return None
        return StepWork(self.flops_to_first - self.flops_before, self.meter.num_bytes - self.bytes_to_first)

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


@record
class Branch:
    request: Request
    choice: int
    params: ResolvedParams
    sampler: Sampler
    assembler: Assembler
    clock: Clock
    end_ids: frozenset[int]
    max_output: int  # tokens: what the request asks for and the context has room for
    speculate: str | None = None  # the drafter that guesses for it
    on_device: bool = False  # its tokens can be chosen by the device alone
    rules: StopRules | None = None  # the request's own
    draws_in_turn: bool = False  # each draw counts the one before it, so that a draft's cannot be made at once
    has_begun: bool = False  # is, or was, in the scheduler
    has_ended: bool = False
    output: list[int] = field(default_factory=list)
    num_given: int = 0  # tokens handed to whoever asked
    logprob_sum: float = 0.0  # of those
    held: str = ""  # text that was reported as held back

    def __post_init__(self) -> None:
        stop_ids = frozenset(self.params.stop_token_ids)
        self._last_ids = self.end_ids | stop_ids
        # Whose text is not shown. An end token has none, unless control tokens are shown.
        silent_ids = stop_ids if self.params.skip_special_tokens else self._last_ids
        self._silent_ids = frozenset() if self.params.include_stop_str else silent_ids
        self.reports_held = self.params.trace and bool(self.params.stop or self.params.bad_words)
        # Logprobs are asked for, or answers are ranked by them.
        self.wants_logprobs = self.params.logprobs is not None or self.params.best_of > self.params.n
        enders = (self.sampler.constraint, self.params.repetition_detector, self.rules)
        self._may_end_anywhere = any(ender is not None for ender in enders)

    def advance(self, output: StepOutput, work: Work, row: int, now: float) -> Outcome:
        """Take in the tokens that a step chose, from this row on: one, and one more for each drafted token that equals
        the one chosen before it."""
        if self.max_output == 0:
            return [], "", (), Ending("length")
        num_samples = work.num_samples
        self.clock.tick(now)
        chosen: list[int] = []
        text = ""
        given: tuple[Token, ...] = ()
        place = len(work.tokens) - num_samples + 1  # of the drafted token that the next choice is compared with
        try:
            token = output.token(self, row, work.start + place)
            chosen.append(token.id)
            text, given, then = self.take(token)
            while then is None and place < len(work.tokens) and work.tokens[place] == token.id:
                row, place = row + 1, place + 1
                token = output.token(self, row, work.start + place)
                chosen.append(token.id)
                more, tokens, then = self.take(token)
                text += more
                given += tokens
        except Exception as error:  # one request's failure is its own
            return chosen, text, given, Failure(error)
        return chosen, text, given, then

    def take(self, token: Token) -> tuple[str, tuple[Token, ...], Ending | Rewind | None]:
        """One more token: the text that is now safe to show, the tokens it completes, and what follows from it."""
        id = token.id
        self.sampler.accept(id)
        self.output.append(id)
        is_last = id in self._last_ids
        text, tokens, match = self.assembler.push(token, not is_last or id not in self._silent_ids)
        then: Ending | Rewind | None = None
        if is_last or match is not None or len(self.output) >= self.max_output or self._may_end_anywhere:
            if isinstance(match, Banned):
                return "", (), Rewind(match.start)
            then = self._ending(id, match)
            if then is not None and match is None:
                more, rest, match = self.assembler.flush()
                text, tokens = text + more, tokens + rest
                if isinstance(match, Stop):
                    then = Ending("stop", match.text)
        self.num_given += len(tokens)
        if self.wants_logprobs:
            self._add_logprobs(tokens)
        return text, tokens, then

    def _ending(self, id: int, match: Stop | None) -> Ending | None:
        """Why the answer ends with this token, if it does. An end token wins over the length, for it is what the model
        meant; a stop string wins over both, for it cuts."""
        if match is not None:
            return Ending("stop", match.text)
        if id in self.params.stop_token_ids:
            return Ending("stop", id)
        if id in self.end_ids:
            return Ending("eos", id)
        if self.rules is not None:
            rule = self.rules.first_met(self.output)
            if rule is not None:
                return Ending("stop", rule)
        if self.sampler.constraint is not None and self.sampler.constraint.is_finished:
            return Ending("constraint")  # nothing but an end could follow: the answer is whole, also at its length
        if len(self.output) >= self.max_output:
            return Ending("length")
        if self.params.repetition_detector and is_repeating(self.output, self.params.repetition_detector):
            return Ending("repetition")
        return None

    def flush(self) -> tuple[str, tuple[Token, ...]]:
        """The end from outside (an abort, a deadline): what is held goes out."""
        text, tokens, _ = self.assembler.flush()
        self.num_given += len(tokens)
        self._add_logprobs(tokens)
        return text, tokens

    def _add_logprobs(self, tokens: tuple[Token, ...]) -> None:
        self.logprob_sum += sum(token.logprob for token in tokens if token.logprob is not None)

    def rewind(self, num_output: int) -> None:
        """Take back the output after its first `num_output` tokens, none of which was given, and choose another token
        than the next one was."""
        refused = self.output[num_output]
        del self.output[num_output:]
        self.sampler.rewind(num_output)
        self.assembler.rewind(num_output)
        if self.rules is not None:
            self.rules.reset()
        self.sampler.ban(refused)

    def usage(self) -> Usage:
        return Usage(self.request.num_prompt, self.num_given, self.request.num_cached)


def is_repeating(output: list[int], detector: RepetitionDetector) -> bool:
    """Whether the output ends with some cycle of at most `period` tokens, `repeats` times over and so long in all."""
    for period in range(1, detector.period + 1):
        length = max(period * detector.repeats, detector.length)
        if len(output) < length:
            return False
        if output[-1] == output[-1 - period] and output[-length:-period] == output[-length + period :]:
            return True
    return False

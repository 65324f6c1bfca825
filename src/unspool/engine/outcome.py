"""The outcome of a step for one branch, as values: tokens, text, and how the branch continues.

A branch returns an outcome; `ActiveRequests.apply` applies it in one place, after the scheduler committed the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unspool.events import FinishReason, Token
from unspool.records import record

if TYPE_CHECKING:
    from unspool.engine.branch import Branch


@record(frozen=True, slots=True)
class Ending:
    """The answer is whole."""

    reason: FinishReason
    stop: str | int | None = None  # the stop string or end token that matched, or the stop rule's name


@record(frozen=True, slots=True)
class Rewind:
    """Keep this many output tokens and continue with a different token at that position."""

    num_output: int


@record(frozen=True, slots=True)
class Failure:
    """The answer cannot go on."""

    error: Exception


@record(frozen=True, slots=True)
class Survivor:
    """A beam of the next step: the beam it comes from, and by which token. If `is_fork`, others come from that too."""

    parent: Branch
    token: int
    is_fork: bool


@record(frozen=True, slots=True)
class Generation:
    """What a beam search has decided: who goes on, in order, and who is dropped. None goes on when it is over."""

    survivors: tuple[Survivor, ...] = ()
    dropped: tuple[Branch, ...] = ()
    is_last: bool = False


Next = Ending | Rewind | Failure | Generation | None  # None: continue


# The model's tokens; text that is final; the tokens whose text is wholly out; how it goes on. A bare tuple, for there
# is one for every token of every stream: with a NamedTuple `unspool bench host` takes 3% longer.
Outcome = tuple[list[int], str, tuple[Token, ...], Next]

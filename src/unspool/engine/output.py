"""The result of a step: tokens that the host chooses from rows of logits, or that the device has chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from unspool.events import Token, bare_token
from unspool.sampling.pipeline import no_token

if TYPE_CHECKING:
    from unspool.engine.branch import Branch
    from unspool.engine.runner import StepRows
    from unspool.ops import HostRows, Launched


class StepOutput(Protocol):
    def wait(self) -> None:
        """Return when the step is computed; raises what went wrong on the device."""

    def token(self, branch: Branch, row: int, position: int) -> Token:
        """The token chosen from a row of logits, with the logprobs and trace that were requested. For a draft, each row
        is read after the branch has accepted the token before it."""

    def rows(self, start: int, count: int) -> HostRows:
        """Rows of logits, for work whose tokens no sampler chooses."""

    def hidden_rows(self, start: int, count: int) -> HostRows:
        """Rows after the last norm, for work that pools them."""


class HostOutput:
    """Rows in the host's memory."""

    def __init__(self, rows: StepRows) -> None:
        self._rows, self._hidden = rows.logits, rows.hidden

    def wait(self) -> None:
        """The rows were waited for."""

    def token(self, branch: Branch, row: int, position: int) -> Token:
        choice = branch.sampler.choose(self._rows[row], position)
        if branch.wants_logprobs:
            return Token(choice.token, choice.logprob, choice.top, choice.trace, choice.rank)
        return bare_token(choice.token) if choice.trace is None else Token(choice.token, None, choice.top, choice.trace)

    def rows(self, start: int, count: int) -> HostRows:
        return self._rows[start : start + count]

    def hidden_rows(self, start: int, count: int) -> HostRows:
        return self._hidden[start : start + count]


class DeviceOutput:
    """Tokens that the device chose, or will have chosen."""

    def __init__(self, launched: Launched) -> None:
        self._launched = launched

    def wait(self) -> None:
        self._tokens = self._launched.tokens()

    def token(self, branch: Branch, row: int, position: int) -> Token:
        id = self._tokens[row]
        if id < 0:
            raise no_token(id, position)
        if not branch.wants_logprobs:
            return bare_token(id)
        logprob, top, rank = self._launched.logprobs(row, branch.params.logprobs or 0)
        return Token(id, logprob, top, rank=rank)

    def rows(self, start: int, count: int) -> HostRows:
        raise AssertionError("a request that needs logits on the host was launched on the device")

    def hidden_rows(self, start: int, count: int) -> HostRows:
        raise AssertionError("a request that needs hidden rows on the host was launched on the device")

"""An answer that may be computed more than once: what was passed on is remembered, and a replay must repeat it.

An answer is a pure function of weights, prompt, parameters and seed. So when the replica that computes it is lost,
another one computes it from the beginning. Its first events are compared with those that were passed on, and only what
follows them is new. Nothing is sent twice, and nothing different is ever sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from unspool.errors import ReplayError
from unspool.events import Event, Failed, Finished, Text, Timings, Token
from unspool.results import Receipt


@dataclass
class Sent:
    """What was passed on of one choice."""

    parts: list[str] = field(default_factory=list)  # of its text
    tokens: list[Token] = field(default_factory=list)
    end: Finished | Failed | None = None


@dataclass
class Progress:
    """How far one attempt has come in one choice, and what of it was passed on before the attempt began."""

    text: str
    num_tokens: int
    characters_seen: int = 0
    tokens_seen: int = 0


class Replay:
    """Turns the events of one attempt after the other into the events of one answer."""

    def __init__(self, num_choices: int) -> None:
        self._sent = [Sent() for _ in range(num_choices)]
        self._progress: list[Progress] = []
        self._receipt: Receipt | None = None
        self.num_attempts = 0

    @property
    def is_done(self) -> bool:
        return all(sent.end is not None for sent in self._sent)

    @property
    def has_sent(self) -> bool:
        return any(sent.parts or sent.tokens or sent.end for sent in self._sent)

    def tokens_of(self, choice: int) -> int:
        return len(self._sent[choice].tokens)

    def open_choices(self) -> list[int]:
        """The choices whose ending was not passed on."""
        return [index for index, sent in enumerate(self._sent) if sent.end is None]

    def begin(self, receipt: Receipt) -> None:
        """Another attempt begins, on a replica with this receipt."""
        if self.has_sent and receipt != self._receipt:
            raise ReplayError(
                "the replica that computed this answer was lost, and none that is left computes the same: "
                f"{_described(self._receipt)} was used, {_described(receipt)} is there"
            )
        self._receipt = receipt
        self._progress = [Progress("".join(sent.parts), len(sent.tokens)) for sent in self._sent]
        self.num_attempts += 1

    def end(self, event: Finished | Failed) -> None:
        """A choice ends here, not by its replica."""
        self._sent[event.choice].end = event

    def push(self, event: Event) -> Event | None:
        """What of an event is new; None: it was passed on before. What differs raises a ReplayError."""
        sent, progress = self._sent[event.choice], self._progress[event.choice]
        if isinstance(event, Text):
            return self._push_text(event, sent, progress)
        if sent.end is not None:
            if _ending(sent.end) != _ending(event):
                raise self._differs(event.choice, f"it ended with {_ending(sent.end)} and then with {_ending(event)}")
            return None
        if progress.tokens_seen < progress.num_tokens or progress.characters_seen < len(progress.text):
            raise self._differs(
                event.choice, f"it ended after {progress.tokens_seen} tokens where {progress.num_tokens} were sent"
            )
        sent.end = event
        return event

    def _push_text(self, event: Text, sent: Sent, progress: Progress) -> Text | None:
        text, tokens = event.text, event.tokens
        old_text = text[: max(0, len(progress.text) - progress.characters_seen)]
        if old_text and not progress.text.startswith(old_text, progress.characters_seen):
            raise self._differs(event.choice, f"the text differs after character {progress.characters_seen}")
        old_tokens = tokens[: max(0, progress.num_tokens - progress.tokens_seen)]
        self._compare(event.choice, old_tokens, sent.tokens, progress.tokens_seen)
        progress.characters_seen += len(text)
        progress.tokens_seen += len(tokens)
        new_text, new_tokens = text[len(old_text) :], tokens[len(old_tokens) :]
        is_behind = progress.characters_seen < len(progress.text) or progress.tokens_seen < progress.num_tokens
        held = "" if is_behind else event.held  # what is held behind text that was passed on was reported with it
        if not new_text and not new_tokens and not held:
            return None
        if sent.end is not None:
            raise self._differs(event.choice, "it goes on where it had ended")
        if new_text:
            sent.parts.append(new_text)
        sent.tokens += new_tokens
        return Text(event.request, event.choice, new_text, new_tokens, held)

    def _compare(self, choice: int, replayed: Sequence[Token], sent: Sequence[Token], first: int) -> None:
        for index, token in enumerate(replayed, first):
            if token != sent[index]:
                what = f"token {index} was {sent[index].id} and is {token.id}"
                if token.id == sent[index].id:
                    what = f"token {index} ({token.id}) has another logprob or trace"
                raise self._differs(choice, what)

    def _differs(self, choice: int, what: str) -> ReplayError:
        return ReplayError(
            f"the replica that computed this answer was lost, and another one computed a different answer: in choice "
            f"{choice} {what}. {_described(self._receipt)} was used for both"
        )


def with_timings(end: Finished, timings: Timings) -> Finished:
    """An ending with the times that the caller waited, over all attempts."""
    return replace(end, timings=timings)


def _ending(end: Finished | Failed) -> tuple[object, ...]:
    if isinstance(end, Failed):
        return (type(end.error).__name__, str(end.error))
    return (end.reason, end.stop, end.usage.completion_tokens, end.seed)


def _described(receipt: Receipt | None) -> str:
    return "nothing" if receipt is None else f"model {receipt.model}, version {receipt.version}, {receipt.kernels}"

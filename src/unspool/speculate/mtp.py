"""Drafting with the head that a model's file brings for it (multi-token prediction, MTP; models/draft_head.py).

The head reads the model's own hidden rows: `watch` gets those of every step. A row of the head stands for a position
of the request: it is made of the hidden row there and the token that follows. So a request's last row can be made when
its next token is chosen, and its logits guess the token after that. Rows beyond are made of the head's own rows in
place of the model's; the model's replace them once it has checked the guesses.

Keys and values of these rows lie in blocks of the head's own. Where the model began behind a prefix that it had cached,
it returns no hidden rows of the prefix; they are copied from another request that has them, running or ended. If none
has, the head sees the request from there on: it guesses worse, and answers do not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import field
from itertools import accumulate
from typing import TYPE_CHECKING

from unspool.cache.blocks import Blocks
from unspool.drafter import BaseDrafter, Draft, DraftContext
from unspool.lazy import np
from unspool.plan import Work
from unspool.records import record
from unspool.speculate.estimates import clamped
from unspool.speculate.lines import PRIORS_BY_PROBABILITY, Line, choose_guess

if TYPE_CHECKING:
    from unspool.ops import HostRows
    from unspool.speculate.protocols import HeadRunner

MAX_PENDING = 256  # hidden rows of a request that wait until it is drafted for; then they are computed
MAX_ENDED = 64  # requests whose rows are kept for others that begin as they do


@record
class Seen:
    """What the head has of a request."""

    offset: int  # the position that its first row stands for
    tokens: list[int] = field(default_factory=list)  # from that position on, as far as the model has computed them
    blocks: list[int] = field(default_factory=list)
    num_rows: int = 0  # of the head that are computed
    hidden: list[np.ndarray] = field(default_factory=list)  # the model's rows for those that are not, in pieces

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_rows

    def cut(self, num_tokens: int) -> None:
        """Forget what comes after the first tokens."""
        if num_tokens >= len(self.tokens):
            return
        del self.tokens[num_tokens:]
        self.num_rows = min(self.num_rows, num_tokens)
        if self.hidden:
            self.hidden = [np.concatenate(self.hidden)[: num_tokens - self.num_rows]]

    def take_hidden(self, count: int) -> np.ndarray:
        """The model's rows for the next rows of the head, which are about to be computed."""
        rows = np.concatenate(self.hidden)
        self.hidden = [rows[count:]] if len(rows) > count else []
        return rows[:count]


class MtpDrafter(BaseDrafter):
    name = "mtp"
    watches = True
    priors = PRIORS_BY_PROBABILITY

    def __init__(self, runner: HeadRunner, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner, self._clock = runner, clock
        self._blocks = Blocks(runner.kv.num_blocks[0], runner.kv.block_size)
        self._seen: dict[int, Seen] = {}  # by request, least recently used first
        self._ended: dict[int, Seen] = {}  # likewise
        self._seconds = self._measure()  # of one drafted token

    def _measure(self) -> float:
        block = self._blocks.allocate()
        work, given = Work(0, 0, (0,), (block,), 1, 1), np.zeros((1, self._runner.width), np.float32)
        times = []
        for _ in range(4):
            begun = self._clock()
            self._runner.run([work], given)
            times.append(self._clock() - begun)
        self._blocks.release([block])
        return max(min(times), 1e-6)  # never free: it is a layer and a head

    def seconds(self, count: int) -> float:
        return self._seconds * count

    # What the model returns ------------------------------------------------------------------------------------------
    def watch(self, number: int, tokens: Sequence[int], work: Work, rows: np.ndarray) -> None:
        seen = self._seen.pop(number, None)
        if seen is None or not seen.offset <= work.start <= seen.offset + len(seen.tokens):
            self._release(seen)
            seen = self._begin(tokens[: work.start])
        self._seen[number] = seen
        seen.cut(work.start - seen.offset)
        if seen.num_pending >= MAX_PENDING:
            self._compute([seen], [work.tokens[0]], num_logits=0)
        seen.tokens += work.tokens
        seen.hidden.append(np.array(rows))

    def _begin(self, prefix: Sequence[int]) -> Seen:
        """The rows of the request whose tokens begin most alike; without one, none.

        Where it has fewer rows than the prefix has tokens, those between are left out: the head takes the rows that it
        has for the prefix's last ones.
        """
        best, count = self._most_alike(prefix)
        if best is None:
            return Seen(len(prefix))
        held = best.blocks[: self._num_blocks(count)]
        for block in held:  # what makes room may end with this very request
            self._blocks.share(block)
        seen = Seen(len(prefix) - count, best.tokens[:count], num_rows=count)
        has_room = self._make_room(seen, len(held), ())
        if has_room:
            for source, target in zip(held, seen.blocks, strict=True):
                self._runner.kv.copy_block(source, target)
        self._blocks.release(held)
        return seen if has_room else Seen(len(prefix))

    def _most_alike(self, prefix: Sequence[int]) -> tuple[Seen | None, int]:
        """Whose rows a prefix can begin with, and how many."""
        best, most = None, 0
        for other in [*self._seen.values(), *self._ended.values()]:
            count = _num_common(other.tokens[: other.num_rows], prefix[other.offset :])
            if count > most:
                best, most = other, count
        return best, most

    def forget(self, number: int) -> None:
        seen = self._seen.pop(number, None)
        if seen is None:
            return
        seen.cut(seen.num_rows)
        self._ended[number] = seen
        while len(self._ended) > MAX_ENDED:
            self._release(self._ended.pop(next(iter(self._ended))))

    # Drafts ----------------------------------------------------------------------------------------------------------
    def propose(self, contexts: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        lines: dict[int, tuple[Line, Seen]] = {}
        for context, count in zip(contexts, counts, strict=True):
            seen = self._seen.pop(context.number, None)
            if seen is not None:
                self._seen[context.number] = seen  # now the most recently used
                seen.cut(len(context.tokens) - 1 - seen.offset)
            if count and seen is not None and seen.num_pending and self._is_up_to_date(seen, context):
                sampler = context.sampler.fork(reports=False)
                line = Line(context.number, list(context.tokens), sampler, count, context.should_continue)
                lines[context.number] = (line, seen)
        if lines:
            self._draft(list(lines.values()))
        return [lines[context.number][0].draft if context.number in lines else Draft() for context in contexts]

    @staticmethod
    def _is_up_to_date(seen: Seen, context: DraftContext) -> bool:
        return seen.offset + len(seen.tokens) == len(context.tokens) - 1

    def _draft(self, pairs: list[tuple[Line, Seen]]) -> None:
        pairs = [
            (line, seen)
            for line, seen in pairs
            if self._make_room(seen, self._num_blocks(len(seen.tokens) + line.left), [each for _, each in pairs])
        ]
        if not pairs:
            return
        following = [line.tokens[-1] for line, _ in pairs]
        logits, rows = self._compute([seen for _, seen in pairs], following, num_logits=1)
        while True:
            left = []
            for index, (line, seen) in enumerate(pairs):
                choose_guess(line, logits[index])
                if line.left:
                    left.append((line, seen, rows[index]))
            if not left:
                return
            pairs = [(line, seen) for line, seen, _ in left]
            begun = self._clock()
            works = [
                Work(line.number, seen.num_rows + len(line.draft) - 1, (line.draft[-1],), tuple(seen.blocks), 1, 1)
                for line, seen in pairs
            ]
            logits, rows = self._runner.run(works, np.stack([row for _, _, row in left]))
            ratio = (self._clock() - begun) / len(works) / self._seconds
            self._seconds *= 1 + 0.1 * (clamped(ratio) - 1)

    def _compute(
        self, requests: Sequence[Seen], following: Sequence[int], num_logits: int
    ) -> tuple[HostRows, np.ndarray]:
        """Make the rows that are pending; `following` are the tokens after the last ones. Logits, where they are
        wanted, and rows, of each request's last."""
        works, given = [], []
        for number, (seen, token) in enumerate(zip(requests, following, strict=True)):
            tokens = (*seen.tokens[seen.num_rows + 1 :], token)
            if not self._make_room(seen, self._num_blocks(len(seen.tokens)), requests):
                raise AssertionError("a request's rows fit in the cache alone")
            works.append(Work(number, seen.num_rows, tokens, tuple(seen.blocks), num_logits, num_logits))
            given.append(seen.take_hidden(len(tokens)))
            seen.num_rows = len(seen.tokens)
        logits, rows = self._runner.run(works, np.concatenate(given))
        return logits, rows[[end - 1 for end in accumulate(map(len, given))]]

    # Room ------------------------------------------------------------------------------------------------------------
    def _num_blocks(self, num_rows: int) -> int:
        return -(-num_rows // self._blocks.block_size)

    def _make_room(self, seen: Seen, num_blocks: int, busy: Sequence[Seen]) -> bool:
        """So many blocks for a request, taken from ended ones and then from those not drafted for just now."""
        missing = num_blocks - len(seen.blocks)
        for others in (self._ended, self._seen):
            for number in list(others):
                if self._blocks.num_free >= missing:
                    break
                if all(others[number] is not each for each in (seen, *busy)):
                    self._release(others.pop(number))
        if self._blocks.num_free < missing:
            return False
        seen.blocks += [self._blocks.allocate() for _ in range(missing)]
        return True

    def _release(self, seen: Seen | None) -> None:
        if seen is not None:
            self._blocks.release(seen.blocks)
            seen.blocks = []


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = min(len(a), len(b))
    if list(a[:count]) == list(b[:count]):
        return count
    return next(index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)

"""Drafting with a model: a smaller one of the same vocabulary, or the target's own first layers (early exit).

The drafter samples with the target's own sampler, forked: the same parameters, the same constraint and, since noise is
keyed by seed, position and token, the same noise. Two models that roughly agree on the probabilities then mostly agree
on the draw, even at temperature 1.

A guess's confidence comes from its probability in the draft model; drafting ends where one more guess would not pay. On
a device that draws, a whole draft is made before the host reads it.

It keeps keys and values in blocks of its own. What it has computed of a request is kept as long as there is room and
the tokens still begin that way, and found again by the next request that begins like it: the next turn of a chat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from unspool.cache.blocks import Blocks, chain_key, root_key
from unspool.drafter import MAX_DRAFT, BaseDrafter, Draft, DraftContext
from unspool.errors import RequestError
from unspool.plan import PENDING, Plan, Work
from unspool.records import record
from unspool.sampling.pipeline import draws_in_turn
from unspool.speculate.estimates import clamped
from unspool.speculate.lines import PRIORS_BY_PROBABILITY, Line, choose_guess
from unspool.speculate.timing import step_times

if TYPE_CHECKING:
    from unspool.ops import Launched
    from unspool.speculate.protocols import Runner
    from unspool.text.tokenizer import Tokenizer

STEP_ROWS = 512  # of prompts that are caught up on, in one call
MAX_IN_FLIGHT = 2  # steps behind the last that a device is asked for
BY_PLACE = tuple(range(MAX_DRAFT))
PROMPT_ROWS = 16  # from which on a step's time shows what a row of a prompt takes
PRIORS_BY_PLACE = (0.7, 0.75, 0.8)


@record
class Known:
    """What the draft model has computed of a request."""

    root: bytes  # where the chain of keys starts: whose prefixes may be shared
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the leading blocks that others can find


@record
class KnownLine(Line):
    known: Known = field(kw_only=True)
    num_read: int = 0  # places of the draft that were read from the device

    @property
    def end(self) -> int:
        """As many tokens as it may come to."""
        return len(self.tokens) + self.left


class ModelDrafter(BaseDrafter):
    def __init__(self, name: str, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self.name, self._runner, self._clock = name, runner, clock
        self.priors = PRIORS_BY_PLACE if runner.can_launch else PRIORS_BY_PROBABILITY
        self._blocks = Blocks(runner.kv.num_blocks[0], runner.kv.block_size)
        self._known: dict[int, Known] = {}  # least recently used first
        self._seconds = self._measure()  # of one drafted token
        self._row_seconds = self._seconds / 4  # of one token of a prompt, until one was seen

    def _measure(self) -> float:
        block = self._blocks.allocate()
        best = min(step_times(self._runner, Plan((Work(0, 0, (0,), (block,), 1, 1),)), 4, self._clock))
        self._blocks.release([block])
        return max(best, 1e-6)  # never free: it is a model

    def propose(self, contexts: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        pairs = zip(contexts, counts, strict=True)
        lines = {context.number: self._line(context, count) for context, count in pairs if count}
        if lines and self._device_can_draw(list(lines.values())):
            self._draft_on_device(list(lines.values()))
        else:
            active = list(lines.values())
            while active and self._step(active):
                active = [line for line in active if line.left]
        return [lines[context.number].draft if context.number in lines else Draft() for context in contexts]

    def _line(self, context: DraftContext, count: int) -> KnownLine:
        known, sampler = self._recall(context), context.sampler.fork(reports=False)
        tokens = list(context.tokens)
        return KnownLine(context.number, tokens, sampler, count, context.should_continue, known=known)

    def seconds(self, count: int) -> float:
        return self._seconds * count

    def forget(self, number: int) -> None:
        self._runner.remove_sampler(number)
        known = self._known.pop(number, None)
        if known is not None:
            self._blocks.release(known.blocks)

    def start_seconds(self, tokens: Sequence[int]) -> float:
        return self._row_seconds * len(tokens)

    # What is known --------------------------------------------------------------------------------------------------
    def _recall(self, context: DraftContext) -> Known:
        known = self._known.pop(context.number, None) or self._begin(context)
        self._known[context.number] = known  # now the most recently used
        same = 0
        for a, b in zip(known.tokens, context.tokens[:-1], strict=False):
            if a != b:
                break
            same += 1
        self._keep(known, same)
        return known

    def _begin(self, context: DraftContext) -> Known:
        """What an earlier request has left of these tokens."""
        size, known = self._blocks.block_size, Known(root_key("draft", context.sampler.params.cache_salt or ""))
        while len(known.tokens) + size < len(context.tokens):
            tokens = context.tokens[len(known.tokens) : len(known.tokens) + size]
            key = chain_key(known.keys[-1] if known.keys else known.root, tokens)
            block = self._blocks.find(key)
            if block is None:
                break
            self._blocks.share(block)
            known.tokens += tokens
            known.blocks.append(block)
            known.keys.append(key)
        return known

    def _keep(self, known: Known, num_tokens: int) -> None:
        """The first tokens, and what is computed of them. Of a block that others can find, all or nothing."""
        size = self._blocks.block_size
        if num_tokens < len(known.keys) * size:
            num_tokens = num_tokens // size * size
        count = -(-num_tokens // size)
        self._blocks.release(known.blocks[count:])
        del known.tokens[num_tokens:], known.blocks[count:], known.keys[count:]

    def _register(self, known: Known, num_tokens: int) -> None:
        """Let others find the full blocks of the first tokens, those that were not guessed."""
        size = self._blocks.block_size
        for index in range(len(known.keys), num_tokens // size):
            parent = known.keys[-1] if known.keys else known.root
            tokens = known.tokens[index * size : (index + 1) * size]
            known.keys.append(chain_key(parent, tokens))
            self._blocks.register(known.blocks[index], known.keys[-1], parent, tokens)

    # Steps ----------------------------------------------------------------------------------------------------------
    def _step(self, lines: Sequence[KnownLine]) -> bool:
        """One more token for each line; False when there is no room for it."""
        plan: list[Work] = []
        for index, line in enumerate(lines):
            if not self._catch_up(line) or not self._make_room(line.known, len(line.tokens), lines):
                return False
            start = len(line.known.tokens)
            plan.append(Work(index, start, tuple(line.tokens[start:]), tuple(line.known.blocks), 1, 1))
        begun = self._clock()
        logits = self._runner.run(Plan(tuple(plan)))
        for line, row in zip(lines, logits, strict=True):
            line.known.tokens = list(line.tokens)
            self._register(line.known, len(line.tokens) - len(line.draft))
            choose_guess(line, row)
        if all(len(work.tokens) == 1 for work in plan):  # catching up on a prompt says nothing of what a guess costs
            ratio = (self._clock() - begun) / len(lines) / self._seconds
            self._seconds *= 1 + 0.1 * (clamped(ratio) - 1)
        elif len(plan) == 1 and len(plan[0].tokens) >= PROMPT_ROWS:
            self._row_seconds += 0.3 * ((self._clock() - begun) / len(plan[0].tokens) - self._row_seconds)
        return True

    def _device_can_draw(self, lines: Sequence[KnownLine]) -> bool:
        return all(
            line.sampler.constraint is None
            and not params.bad_words
            and not draws_in_turn(params)
            and self._runner.can_draw(params)
            for line in lines
            for params in (line.sampler.params,)
        )

    def _draft_on_device(self, lines: Sequence[KnownLine]) -> None:
        """All guesses without a word to the host: each feeds the next step there, and they are read at the end.

        How sure each looks is not known in time, so they are marked by their place.
        """
        if not all(self._catch_up(line) and self._make_room(line.known, line.end, lines) for line in lines):
            return
        begun, is_prompt = self._clock(), any(len(line.tokens) - len(line.known.tokens) > 2 for line in lines)
        flights: list[tuple[list[KnownLine], Launched]] = []
        for line in lines:
            self._runner.add_sampler(line.number, line.sampler)
        active = list(lines)
        while active:
            place = len(flights)
            flights.append((active, self._launch(active, place)))
            if place >= MAX_IN_FLIGHT:
                flights[place - MAX_IN_FLIGHT][1].tokens()  # the device keeps the last few
            active = [line for line in active if line.left > place + 1 and line.should_continue(BY_PLACE[: place + 1])]
        for line in lines:
            line.known.tokens = list(line.tokens)
            self._register(line.known, len(line.tokens))
        for members, flight in flights:
            for line, token in zip(members, flight.tokens(), strict=True):
                if len(line.draft) == line.num_read and token >= 0:  # after one that could not be drawn, none counts
                    line.draft.append(token)
                line.num_read += 1
        for line in lines:
            line.draft.confidences = list(BY_PLACE[: len(line.draft)])
            line.known.tokens += line.draft[: line.num_read - 1]
        if not is_prompt:
            ratio = (self._clock() - begun) / sum(len(members) for members, _ in flights) / self._seconds
            self._seconds *= 1 + 0.1 * (clamped(ratio) - 1)

    def _launch(self, lines: Sequence[KnownLine], place: int) -> Launched:
        """Queue the step for the guesses at a place of the draft."""
        works = []
        for line in lines:
            start = len(line.tokens) + place - 1 if place else len(line.known.tokens)
            tokens = (PENDING,) if place else tuple(line.tokens[start:])
            works.append(Work(line.number, start, tokens, tuple(line.known.blocks), 1, 1))
        return self._runner.launch(Plan(tuple(works)))

    def _catch_up(self, line: KnownLine) -> bool:
        """Compute what the target already has, up to the last few tokens, in steps of bounded size."""
        while len(line.tokens) - len(line.known.tokens) > STEP_ROWS:
            start = len(line.known.tokens)
            if not self._make_room(line.known, start + STEP_ROWS, (line,)):
                return False
            tokens, begun = line.tokens[start : start + STEP_ROWS], self._clock()
            self._runner.run(Plan((Work(0, start, tuple(tokens), tuple(line.known.blocks), 0, 0),)))
            line.known.tokens += tokens
            self._row_seconds += 0.3 * ((self._clock() - begun) / STEP_ROWS - self._row_seconds)
        return True

    def _make_room(self, known: Known, num_tokens: int, lines: Sequence[KnownLine]) -> bool:
        """Blocks for this many tokens, taken from requests not drafted for just now if need be."""
        missing = -(-num_tokens // self._blocks.block_size) - len(known.blocks)
        busy = {id(line.known) for line in lines}
        for number in list(self._known):
            if self._blocks.num_free >= missing:
                break
            if id(self._known[number]) not in busy:
                self.forget(number)
        if self._blocks.num_free < missing:
            return False
        known.blocks += [self._blocks.allocate() for _ in range(missing)]
        return True


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer, path: str) -> None:
    """A draft in another vocabulary would be noise: refuse it before any time is lost."""
    if target.fingerprint == draft.fingerprint:
        return
    size, other = target.vocab_size, draft.vocab_size
    if size != other:
        raise RequestError(
            f"the draft model {path} has {other:,} tokens, this model {size:,}: they must share a tokenizer",
            "speculate",
        )
    differing = next((i for i in range(size) if target.token_bytes(i) != draft.token_bytes(i)), None)
    where = "their merges differ" if differing is None else f"token {differing} differs"
    raise RequestError(f"the draft model {path} has another tokenizer: {where}", "speculate")

"""Speculation inside the engine: who gets a draft, how long, and what became of it.

Drafts are tokens still to compute, nothing more: the scheduler plans them, the sampler's own choices check them, and
`Scheduler.commit` forgets those that were not chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unspool.engine.plan import Plan, Work
from unspool.engine.runner import Runner, make_runner
from unspool.errors import RequestError
from unspool.sampling.speculate import Drafter, Sight
from unspool.sampling.speculate.lookup import Lookup
from unspool.sampling.speculate.model import ModelDrafter, check_same_tokenizer
from unspool.sampling.speculate.pace import MOST, Acceptance, Costs, draft_length

if TYPE_CHECKING:
    from unspool.cache.blocks import Blocks
    from unspool.config import EngineConfig
    from unspool.engine.branch import Branch
    from unspool.engine.engine import Engine
    from unspool.params import ResolvedParams

MEASURED_ROWS = (1, 2, 3, 4, 6, 9, 13, 17)


@dataclass
class Tally:
    """What came of drafts: of one request, or of all."""

    steps: int = 0  # steps that had a draft
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0] * MOST)  # by place in the draft
    seconds_saved: float = 0.0  # by the measured costs: the plain steps that were not needed, less what drafting took

    def add(self, drafted: int, accepted: int, saved: float) -> None:
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        for place in range(min(accepted, MOST)):
            self.accepted_at[place] += 1
        self.seconds_saved += saved

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_at": self.accepted_at[: max((i + 1 for i, n in enumerate(self.accepted_at) if n), default=0)],
            "mean_accepted": self.accepted / self.steps if self.steps else 0.0,
            "seconds_saved": self.seconds_saved,
        }


@dataclass
class Guess:
    """A draft that was proposed: `sent` of it were given to the model to check."""

    tokens: list[int]
    sent: int


class Speculation:
    """Owned by the engine; `draft` before a plan, `learn` from every choice."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        runner: Runner,
        blocks: Blocks,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafters = drafters
        self.total = Tally()
        self._tallies: dict[int, Tally] = {}
        self._chances: dict[int, Acceptance] = {}
        self._guesses: dict[int, Guess] = {}
        self._runner, self._blocks, self._clock = runner, blocks, clock
        self._costs: Costs | None = None

    def draft(self, branches: Sequence[Branch], num_rows: int) -> None:
        """Give each branch that decodes and wants it a draft. `num_rows` is what the step has without drafts."""
        wanting = [branch for branch in branches if self._drafter_of(branch) and branch.request.num_left == 1]
        if not wanting:
            return
        if self._costs is None:
            self._costs = self._measure()
        by_drafter: dict[str, list[Branch]] = {}
        for branch in wanting:
            by_drafter.setdefault(self._drafter_of(branch) or "", []).append(branch)
        for name, group in by_drafter.items():
            num_rows = self._draft_with(self.drafters[name], group, num_rows)

    def _drafter_of(self, branch: Branch) -> str | None:
        name = branch.speculate
        return name if name in self.drafters else None

    def _draft_with(self, drafter: Drafter, branches: Sequence[Branch], num_rows: int) -> int:
        assert self._costs is not None
        lengths = []
        for branch in branches:
            chance = self._chances.setdefault(branch.request.number, Acceptance()).chance
            room = branch.max_output - len(branch.output) - 1
            length = draft_length(chance, num_rows, room, self._costs, drafter.seconds)
            lengths.append(length)
            num_rows += length
        # A free drafter guesses one token even where none is sent, to learn from; a costly one tries now and then.
        asked = [
            max(length, int(self._may_peek(drafter, branch))) for length, branch in zip(lengths, branches, strict=True)
        ]
        sights = [
            Sight(b.request.number, b.request.tokens, b.request.num_prompt, b.request.blocks, b.sampler)
            for b in branches
        ]
        for branch, length, tokens in zip(branches, lengths, drafter.propose(sights, asked), strict=True):
            vocab_size = branch.sampler.vocab_size
            sane = [token for token in tokens[:MOST] if isinstance(token, int) and 0 <= token < vocab_size]
            sent = sane[:length] if len(sane) == len(tokens[:MOST]) else []
            branch.request.draft = sent
            self._guesses[branch.request.number] = Guess(sane, len(sent))
        return num_rows

    def _may_peek(self, drafter: Drafter, branch: Branch) -> bool:
        return drafter.seconds(1) == 0 or len(branch.output) % 16 == 0

    def learn(self, branch: Branch, chosen: Sequence[int]) -> None:
        """The model chose; compare with what was guessed."""
        guess = self._guesses.pop(branch.request.number, None)
        if guess is None:
            return
        chance = self._chances[branch.request.number]
        accepted = 0
        for token, guessed in zip(chosen, guess.tokens, strict=False):
            chance.observe(token == guessed)
            if token != guessed:
                break
            accepted += 1
        if guess.sent:
            accepted = min(accepted, guess.sent, len(chosen))
            saved = self._saved(branch, guess.sent, accepted)
            self._tallies.setdefault(branch.request.number, Tally()).add(guess.sent, accepted, saved)
            self.total.add(guess.sent, accepted, saved)

    def _saved(self, branch: Branch, sent: int, accepted: int) -> float:
        assert self._costs is not None
        drafter = self.drafters[self._drafter_of(branch) or ""]
        return accepted * self._costs(1) - (self._costs(1 + sent) - self._costs(1)) - drafter.seconds(sent)

    def observe(self, plan: Plan, seconds: float) -> None:
        """A step that only decoded: its rows and its time keep the costs true."""
        if self._costs is not None and all(work.num_samples == len(work.tokens) for work in plan.works):
            self._costs.observe(plan.num_tokens, seconds)

    def choose(self, params: ResolvedParams, config: EngineConfig) -> str | None:
        """The drafter for a request: what it asks for, else the engine's own."""
        if params.speculate == "off" or params.beam is not None:
            return None
        if params.speculate is None:
            return next(iter(self.drafters), None)
        if params.speculate not in self.drafters:
            have = ", ".join(self.drafters) or "none; the engine's option speculate names them"
            raise RequestError(f"speculate is {params.speculate!r}; this engine's drafters: {have}", "speculate")
        return params.speculate

    def tally(self, branch: Branch) -> Tally | None:
        return self._tallies.get(branch.request.number)

    def forget(self, branch: Branch) -> None:
        number = branch.request.number
        self._chances.pop(number, None)
        self._guesses.pop(number, None)
        self._tallies.pop(number, None)
        for drafter in self.drafters.values():
            drafter.forget(number)

    def _measure(self) -> Costs:
        """Time steps of a few rows on a block that nobody holds."""
        if self._blocks.num_free == 0:
            return Costs([(1, 1.0), (2, 2.0)])  # nothing to measure on: drafts do not pay
        block = self._blocks.allocate()
        points: list[tuple[int, float]] = []
        try:
            for rows in MEASURED_ROWS:
                tokens = (0,) * min(rows, self._blocks.block_size)
                plan = Plan((Work(0, 0, tokens, (block,), len(tokens), len(tokens)),))
                times = []
                for _ in range(3):
                    start = self._clock()
                    self._runner.run(plan)
                    times.append(self._clock() - start)
                if not points or len(tokens) > points[-1][0]:
                    points.append((len(tokens), max(min(times), 1e-9)))
        finally:
            self._blocks.release([block])
        return Costs(points) if len(points) > 1 else Costs([(1, 1.0), (2, 2.0)])


def make_drafters(engine: Engine) -> dict[str, Drafter]:
    """The drafters that an engine's configuration names; the first is the one that requests get."""
    name = engine.config.speculate
    if name is None:
        return {}
    kind, _, detail = name.partition(":")
    if name in ("lookup", "auto"):
        return {"lookup": Lookup()}
    if kind == "early-exit":
        return {"early-exit": _early_exit(engine, detail), "lookup": Lookup()}
    if kind == "model" and detail:
        return {"model": _draft_model(engine, detail), "lookup": Lookup()}
    raise RequestError(f"speculate is {name!r}; allowed: lookup, model:PATH, early-exit[:LAYERS], auto", "speculate")


def _early_exit(engine: Engine, detail: str) -> Drafter:
    most = engine.checkpoint.config.num_layers
    try:
        num_layers = int(detail) if detail else max(1, most // 2)
    except ValueError:
        num_layers = 0
    if not 1 <= num_layers <= most:
        raise RequestError(f"early-exit has {detail!r} layers; the model has {most}", "speculate")
    cut = engine.runner.model.early(num_layers)
    return ModelDrafter("early-exit", make_runner(cut, engine.config, engine.runner.kv.num_blocks))


def _draft_model(engine: Engine, path: str) -> Drafter:
    from unspool.models.registry import build
    from unspool.weights.checkpoint import open_checkpoint
    from unspool.weights.store import resolve

    checkpoint = open_checkpoint(resolve(path))
    if engine.tokenizer is None:
        raise RequestError("a draft model needs the target's tokenizer, to check that they share it", "speculate")
    check_same_tokenizer(engine.tokenizer, checkpoint.tokenizer(), path)
    model = build(checkpoint.config, checkpoint.weights, engine.ops)
    return ModelDrafter("model", make_runner(model, engine.config, engine.runner.kv.num_blocks))

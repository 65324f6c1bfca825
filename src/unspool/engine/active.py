"""The requests that have not ended: how they begin, what outcomes do to them, and how they end.

Invariant: the scheduler holds exactly the requests of `branches`, and every group in `groups` has at least one branch
whose ending was not sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from unspool.engine.beams import BeamGroup
from unspool.engine.branch import Branch
from unspool.engine.building import GroupBuilder
from unspool.engine.group import Group
from unspool.engine.outcome import Ending, Failure, Generation, Outcome, Rewind
from unspool.engine.scheduler import Scheduler
from unspool.errors import EngineError
from unspool.events import Event, Failed, Finished, FinishReason, Text
from unspool.plan import Plan
from unspool.speculate.speculation import Speculation

if TYPE_CHECKING:
    from unspool.engine.runner import Runner
    from unspool.engine.steps import StepMeter


class ActiveRequests:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        speculation: Speculation,
        builder: GroupBuilder,
        steps: StepMeter,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._runner, self._speculation, self._builder = scheduler, runner, speculation, builder
        self._steps, self._now = steps, clock
        self.groups: dict[str, Group] = {}
        self.branches: dict[int, tuple[Group, Branch]] = {}  # those that have begun, by the scheduler's number
        self.num_on_host = 0  # of them: whose tokens the host must choose
        self.num_in_turn = 0  # and whose draws depend on those before them
        self.finished: Counter[str] = Counter()  # answers, by reason
        self._deadlines: dict[str, float] = {}
        self._unstarted: set[int] = set()
        self._events: list[Event] = []

    @property
    def has_work(self) -> bool:
        return bool(self.groups or self._events)

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Beginning ------------------------------------------------------------------------------------------------------
    def add(self, group: Group) -> None:
        """A request begins with its first branch; the others start when its prompt is computed."""
        self.groups[group.id] = group
        if group.deadline is not None:
            self._deadlines[group.id] = group.deadline
        leader = group.branches[0]
        self._begin(group, leader)
        self._unstarted.add(leader.request.number)
        self._scheduler.add(leader.request)

    def _begin(self, group: Group, branch: Branch) -> None:
        branch.has_begun = True
        number = branch.request.number
        self.branches[number] = (group, branch)
        self.num_in_turn += branch.draws_in_turn
        if branch.on_device:
            self._runner.add_sampler(number, branch.sampler)
        else:
            self.num_on_host += 1

    def fork_siblings(self, group: Group, leader: Branch) -> None:
        """The prompt is computed: the other branches start on its blocks."""
        group.has_forked = True
        for branch in group.branches[1:]:
            self._begin(group, branch)
            branch.clock.follow(leader.clock)
            self._scheduler.fork(leader.request, branch.request)

    def mark_started(self, plan: Plan, now: float) -> None:
        """Note the start time of requests whose first step this is."""
        if self._unstarted:
            for work in plan.works:
                if work.request in self._unstarted:
                    self._unstarted.discard(work.request)
                    self.branches[work.request][1].clock.start(now, self._steps)

    # Outcomes -------------------------------------------------------------------------------------------------------
    def apply(self, group: Group, branch: Branch, outcome: Outcome) -> None:
        """Apply an outcome to its branch. The scheduler has already committed the tokens that the step chose."""
        _, text, tokens, then = outcome
        held = branch.assembler.held if branch.reports_held and then is None else ""
        if text or tokens or held != branch.held:
            branch.held = held
            event = Text(group.id, branch.choice, text, tokens, held)
            if group.is_ranked:
                self._events += group.deliver(event)
            else:
                self._events.append(event)
        if then is None:
            return
        if isinstance(then, Ending):
            self._finish(group, branch, then)
        elif isinstance(then, Rewind):
            branch.rewind(then.num_output)
            self._scheduler.rewind(branch.request, branch.request.num_prompt + then.num_output)
        elif isinstance(then, Failure):
            self._fail(group, branch, then.error)
        else:
            assert isinstance(group, BeamGroup)
            self._apply_generation(group, then)

    def _apply_generation(self, group: BeamGroup, generation: Generation) -> None:
        """Fork beams before their parents continue, so that a fork shares the common prefix."""
        beams = []
        for survivor in generation.survivors:
            branch = survivor.parent
            if survivor.is_fork:
                branch = group.fork(survivor.parent, self._builder.request_like(survivor.parent.request))
                branch.request.tokens.append(survivor.token)
                self._scheduler.fork(survivor.parent.request, branch.request)
                self._begin(group, branch)
            beams.append(branch)
        for branch, survivor in zip(beams, generation.survivors, strict=True):
            if not survivor.is_fork:
                branch.request.tokens.append(survivor.token)
                branch.request.is_paused = False
            branch.output.append(survivor.token)
            branch.sampler.accept(survivor.token)
        for branch in generation.dropped:
            self._drop(branch)
        if not generation.is_last:
            group.branches = beams
            return
        group.branches = beams if generation.survivors or generation.dropped else group.branches
        self._end_search(group)

    # Ending ---------------------------------------------------------------------------------------------------------
    def _finish(self, group: Group, branch: Branch, ending: Ending) -> None:
        event = Finished(
            request=group.id,
            choice=branch.choice,
            reason=ending.reason,
            usage=branch.usage(),
            timings=branch.clock.timings(self._now(), branch.num_given),
            work=branch.clock.work(),
            stop=ending.stop,
            seed=branch.sampler.seed,
            speculation=self._speculation.stats_of(branch),
        )
        self._end(group, branch, event, ending.reason)

    def _fail(self, group: Group, branch: Branch, error: Exception) -> None:
        """One branch fails alone; before the branches part, they fail together."""
        if isinstance(group, BeamGroup):
            self._fail_search(group, error)
            return
        for each in [branch] if group.has_forked else group.branches:
            self._end(group, each, Failed(group.id, each.choice, error), "error")

    def _end(self, group: Group, branch: Branch, event: Finished | Failed, reason: str) -> None:
        branch.has_ended = True
        if branch.has_begun:
            self._drop(branch, has_failed=isinstance(event, Failed))
        self.finished[reason] += 1
        self._events += group.deliver(event)
        if group.is_done:
            self._forget(group)

    def _end_search(self, group: BeamGroup, reason: FinishReason | None = None) -> None:
        for branch in group.branches:
            self._drop(branch)
        self._forget(group)
        events = group.results(reason, self._now())
        self.finished.update(event.reason for event in events if isinstance(event, Finished))
        self._events += events

    def _fail_search(self, group: BeamGroup, error: Exception) -> None:
        for beam in group.branches:
            self._drop(beam, has_failed=True)
        self._forget(group)
        self.finished["error"] += group.params.n
        self._events += [Failed(group.id, choice, error) for choice in range(group.params.n)]

    def fail_all(self, plan: Plan, error: Exception) -> None:
        """The step itself failed: every request in it ends with the error."""
        failure = EngineError(f"the step failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        for work in plan.works:
            if work.request in self.branches:
                self._fail(*self.branches[work.request], failure)

    def abort(self, id: str, reason: FinishReason = "abort") -> bool:
        """End a request now and deliver the output that it has. False: there is no such request (any more)."""
        group = self.groups.get(id)
        if group is None:
            return False
        if isinstance(group, BeamGroup):
            self._end_search(group, reason)
            return True
        for branch in group.branches:
            if not branch.has_ended:
                text, tokens = branch.flush()
                self.apply(group, branch, ([], text, tokens, Ending(reason)))
        return True

    def expire(self) -> None:
        """End those whose deadline has passed."""
        if self._deadlines:
            now = self._now()
            for id in [id for id, deadline in self._deadlines.items() if now >= deadline]:
                self.abort(id, "deadline")

    def _drop(self, branch: Branch, *, has_failed: bool = False) -> None:
        number = branch.request.number
        self._speculation.forget(branch)
        self._runner.remove_sampler(number)
        self.num_in_turn -= branch.draws_in_turn
        self.num_on_host -= not branch.on_device
        self._unstarted.discard(number)
        del self.branches[number]
        self._scheduler.remove(branch.request, has_failed=has_failed)

    def _forget(self, group: Group) -> None:
        del self.groups[group.id]
        self._deadlines.pop(group.id, None)

    def check(self) -> None:
        """Assert that every block is accounted for and that no request is lost."""
        self._scheduler.check()
        known = {request.number for request in [*self._scheduler.running, *self._scheduler.waiting]}
        assert known == set(self.branches), f"the scheduler has {known}, the engine {set(self.branches)}"

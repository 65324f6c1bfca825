"""Settings × items × seeds: every item of some tasks answered with several sampling settings, resumable.

Answers of one setting depend on nothing else that runs, so all of them share one engine and its batches. A greedy
setting has one answer for each item, a sampled one has one for each seed.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from unspool.errors import RequestError
from unspool.evaluation.scorers import Scorer
from unspool.evaluation.tasks import Item
from unspool.params import RepetitionDetector, SamplingParams
from unspool.params.kinds import Integer, Kind, Number
from unspool.params.registry import BY_NAME

if TYPE_CHECKING:
    from unspool.engine.streams import Stream
    from unspool.llm import LLM
    from unspool.reporting import Journal

Form = Literal["raw", "chat"]
Key = tuple[Form, str, str, str, int]  # form, task, item, setting, seed
# A loop: a passage of up to 64 tokens, four times in a row, and at least 48 tokens of it.
DETECTOR = RepetitionDetector(period=64, repeats=4, length=48)
IN_FLIGHT = 64  # requests that the engine has at once


@dataclass(frozen=True)
class Setting:
    """Sampling parameters by name; what is not given is off, not the model's default."""

    name: str
    params: Mapping[str, Any]

    @property
    def is_greedy(self) -> bool:
        return self.params.get("temperature", 1.0) == 0


PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_SHORT = {"t": "temperature", "p": "top_p", "k": "top_k", "m": "min_p", "rep": "repetition_penalty",
          "pres": "presence_penalty", "freq": "frequency_penalty", "dry": "dry_multiplier"}  # fmt: skip


def setting(text: str) -> Setting:
    """`greedy`, or values as in `t=0.7,p=0.9`: t, p, k, m(in_p), rep, pres, freq, dry, or a parameter's whole name."""
    values: dict[str, Any] = {}
    for part in text.split(","):
        if part == "greedy":
            values["temperature"] = 0.0
            continue
        name, separator, value = part.partition("=")
        name = _SHORT.get(name.strip(), name.strip())
        try:
            values[name] = int(value) if isinstance(_kind(name), Integer) else float(value)
        except ValueError:
            separator = ""
        if not separator or not isinstance(_kind(name), Integer | Number):
            raise RequestError(
                f"setting is {text!r}; allowed: greedy, or NAME=NUMBER,… as in t=0.7,p=0.9 with "
                f"{', '.join(_SHORT)} or a parameter's name", "setting",
            )  # fmt: skip
    SamplingParams(**values)  # refuses what is out of range
    return Setting(text, PLAIN | values)


def _kind(name: str) -> Kind | None:
    return BY_NAME[name].kind if name in BY_NAME else None


@dataclass(frozen=True)
class Job:
    task: str
    item: Item
    setting: Setting
    seed: int  # 0: greedy
    form: Form = "raw"

    @property
    def key(self) -> Key:
        return self.form, self.task, self.item.id, self.setting.name, self.seed

    @property
    def draw_seed(self) -> int:
        """Of the item too: draws depend on seed, position and token alone, so with one seed for all, similar items
        would all be lucky or unlucky together, and intervals over items too narrow. Settings share it, as pairs do."""
        return zlib.crc32(f"{self.task}\n{self.item.id}\n{self.seed}".encode())


@dataclass(frozen=True)
class Answer:
    """What came of a job; JSON-ready."""

    form: Form
    task: str
    item: str
    setting: str
    seed: int
    text: str
    answer: str
    score: float | None  # None: there is no right answer
    tokens: int
    reason: str  # why it ended; "repetition": it repeated itself
    logprob: float  # mean of its tokens

    @property
    def key(self) -> Key:
        return self.form, self.task, self.item, self.setting, self.seed

    @property
    def loops(self) -> bool:
        return self.reason == "repetition"


def jobs_of(
    task: str, items: Sequence[Item], settings: Sequence[Setting], seeds: Sequence[int], *, form: Form = "raw"
) -> list[Job]:
    """Items in the outer loop, so that what runs together shares its prompt."""
    return [
        Job(task, item, each, seed, form)
        for item in items
        for each in settings
        for seed in ([0] if each.is_greedy else seeds)
    ]  # fmt: skip


def journal_head(llm: LLM, **more: Any) -> dict[str, Any]:
    """What a journal of answers must have in common with the run that goes on from it."""
    return {"model": llm.checkpoint.name, "kernels": llm.receipt(0).kernels, **more, "seeds": "of each item"}


class Grid:
    """Runs jobs and remembers their answers in a journal."""

    def __init__(self, llm: LLM, scorer: Scorer, journal: Journal) -> None:
        self._llm, self._scorer, self._journal = llm, scorer, journal
        self.answers = {answer.key: answer for answer in (Answer(**item) for item in journal.items)}

    def run(self, jobs: Sequence[Job], note: Callable[[int], None] | None = None) -> list[Answer]:
        """The answers of all jobs, in their order. What the journal has is not computed again."""
        left = [job for job in jobs if job.key not in self.answers]
        done = len(jobs) - len(left)
        if note is not None:
            note(done)
        for job, answer in self._computed(left):
            self.answers[job.key] = answer
            self._journal.add(asdict(answer))
            done += 1
            if note is not None:
                note(done)
        return [self.answers[job.key] for job in jobs]

    def _computed(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Answer]]:
        flying: deque[tuple[Job, Stream]] = deque()
        waiting = deque(jobs)
        try:
            while waiting or flying:
                while waiting and len(flying) < IN_FLIGHT:
                    job = waiting.popleft()
                    flying.append((job, self._start(job)))
                job, stream = flying.popleft()
                yield job, self._answer(job, stream)
        finally:
            for _, stream in flying:
                stream.close()

    def _start(self, job: Job) -> Stream:
        item = job.item
        params = SamplingParams(
            **{**job.setting.params, "max_tokens": item.max_tokens, "stop": item.stop if job.form == "raw" else None,
               "seed": job.draw_seed, "logprobs": 0, "repetition_detector": DETECTOR},
        )  # fmt: skip
        if job.form == "raw":
            return self._llm.stream(item.prompt, params)
        question = item.prompt if item.question is None else item.question
        return self._llm.stream([{"role": "user", "content": question}], params)

    def _answer(self, job: Job, stream: Stream) -> Answer:
        choice = stream.result().choices[0]
        logprobs = choice.logprobs or [0.0]
        return Answer(
            job.form, job.task, job.item.id, job.setting.name, job.seed, choice.content,
            self._scorer.answer(job.item, choice.content), self._scorer.score(job.item, choice.content),
            len(choice.tokens), choice.finish_reason, sum(logprobs) / len(logprobs),
        )  # fmt: skip


def with_max_tokens(items: Sequence[Item], most: int | None) -> list[Item]:
    return list(items) if most is None else [replace(item, max_tokens=most) for item in items]

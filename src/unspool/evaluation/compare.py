"""Greedy against sampling: what settings differ in, item by item, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from unspool.evaluation.grid import Answer, Setting
from unspool.evaluation.statistics import best_of, bootstrap, most_frequent, paired

ByItem = Mapping[str, Sequence[Answer]]


def by_item(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.item, []).append(answer)
    return found


def summarize(task: str, setting: Setting, answers: Sequence[Answer], baseline: Sequence[Answer]) -> dict[str, Any]:
    """One setting on one task, beside the baseline's answers to the same items. JSON-ready."""
    items, base = by_item(answers), by_item(baseline)
    shared = [item for item in items if item in base]
    scored = all(answer.score is not None for answer in answers)
    return {
        "task": task,
        "setting": setting.name,
        "params": dict(setting.params),
        "items": len(items),
        "answers": len(answers),
        "changed": _changes(items, base, shared),
        "loops": bootstrap([fmean(answer.loops for answer in each) for each in items.values()]).as_dict(),
        "cut": fmean(answer.reason == "length" for answer in answers),
        "tokens": fmean(answer.tokens for answer in answers),
        **(_scores(items, base, shared) if scored else dict.fromkeys(SCORES)),
    }


SCORES = ("score", "difference", "best_of", "likeliest", "majority")


def _scores(items: ByItem, base: ByItem, shared: Sequence[str]) -> dict[str, Any]:
    seeds = min(len(each) for each in items.values())
    return {
        "score": bootstrap([_mean_score(each) for each in items.values()]).as_dict(),
        "difference": _difference(items, base, shared).as_dict() if shared else None,
        "best_of": {str(size): _best(items, size) for size in _sizes(seeds)},
        "likeliest": bootstrap([_likeliest(each) for each in items.values()]).as_dict(),
        "majority": bootstrap([_majority(each) for each in items.values()]).as_dict(),
    }


def _score(answer: Answer) -> float:
    assert answer.score is not None  # asked only where all are scored
    return answer.score


def _mean_score(answers: Sequence[Answer]) -> float:
    return fmean(map(_score, answers))


def _difference(items: ByItem, base: ByItem, shared: Sequence[str]) -> Any:
    return paired([_mean_score(items[item]) for item in shared], [_mean_score(base[item]) for item in shared])


def _changes(items: ByItem, base: ByItem, shared: Sequence[str]) -> dict[str, Any]:
    """Against the baseline's first answer: other answers, and right ones that became wrong or the other way round."""
    pairs = [(answer, base[item][0]) for item in shared for answer in items[item]]
    return {
        "answers": len(pairs),
        "other": sum(ours.answer != theirs.answer for ours, theirs in pairs),
        "gained": sum((ours.score or 0) > (theirs.score or 0) for ours, theirs in pairs),
        "lost": sum((ours.score or 0) < (theirs.score or 0) for ours, theirs in pairs),
    }


def _sizes(seeds: int) -> list[int]:
    """1, 2, 4, … and all."""
    return sorted({size for size in (1, 2, 4, 8, 16, 32, 64) if size < seeds} | {seeds})


def _best(items: ByItem, size: int) -> dict[str, Any]:
    """The mean over items of the expected best score of `size` answers."""
    return bootstrap([best_of([_score(answer) for answer in each], size) for each in items.values()]).as_dict()


def _likeliest(answers: Sequence[Answer]) -> float:
    """The score of the answer whose tokens the model found likeliest in the mean: needs no scorer to choose."""
    return _score(max(answers, key=lambda answer: answer.logprob))


def _majority(answers: Sequence[Answer]) -> float:
    chosen = most_frequent([answer.answer for answer in answers])
    return next(_score(answer) for answer in answers if answer.answer == chosen)

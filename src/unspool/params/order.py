"""The order of the stages, as data: named presets that reproduce other engines, and the rules that come with them.

Every preset holds every stage, so that a parameter which the engine it is named after does not know is still
honoured; docs/sampling.md says which ones those are. The draw always comes last and is not named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from unspool.errors import RequestError
from unspool.params.registry import PARAMETERS
from unspool.records import record
from unspool.suggest import nearest

if TYPE_CHECKING:
    from unspool.params.rules import Stage

Scope = Literal["all", "output", "mixed"]

SPECS = {spec.name: spec for parameter in PARAMETERS for spec in parameter.stages}
# Stages that only shape a draw: at temperature 0 there is none, and they are absent.
DRAW_STAGES = frozenset(name for name, spec in SPECS.items() if spec.shapes_draw)

_MASKS = ("bias", "allowed", "constraint")
_PENALTIES = ("repetition", "frequency", "presence", "dry", "no_repeat_ngram")


@record(frozen=True)
class Preset:
    """An order of stages, and which tokens its penalties count (a window of -1 looks back on everything)."""

    stages: tuple[str, ...]
    penalty_window: int
    penalty_scope: Scope  # mixed: repetition counts prompt and output; frequency and presence the output alone


def _completed(preset: Preset) -> Preset:
    """With the stages that the preset does not place: those that shape a draw last, others after the penalties."""
    first = next(index for index, name in enumerate(preset.stages) if name in DRAW_STAGES)
    rest = [name for name in SPECS if name not in {*preset.stages, "top_k", "top_k_ties"}]
    masks = [name for name in rest if name not in DRAW_STAGES]
    draws = [name for name in rest if name in DRAW_STAGES]
    return replace(preset, stages=(*preset.stages[:first], *masks, *preset.stages[first:], *draws))


PRESETS: dict[str, Preset] = {
    "unspool": Preset(
        (*_MASKS, *_PENALTIES, "top_n_sigma", "temperature", "top_k", "top_p", "min_p", "typical_p", "xtc"),
        penalty_window=-1,
        penalty_scope="mixed",
    ),
    "transformers": Preset(
        (*_MASKS, *_PENALTIES, "top_n_sigma", "temperature", "top_k_ties", "top_p", "min_p", "typical_p", "xtc"),
        penalty_window=-1,
        penalty_scope="all",
    ),
    "vllm": Preset(
        (*_MASKS, *_PENALTIES, "top_n_sigma", "temperature", "min_p", "top_k_ties", "top_p", "typical_p", "xtc"),
        penalty_window=-1,
        penalty_scope="mixed",
    ),
    "llama.cpp": Preset(
        (*_MASKS, *_PENALTIES, "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"),
        penalty_window=64,
        penalty_scope="all",
    ),
    "mlx": Preset(
        (*_MASKS, *_PENALTIES, "top_n_sigma", "typical_p", "top_p", "min_p", "xtc", "top_k", "temperature"),
        penalty_window=20,
        penalty_scope="all",
    ),
}
PRESETS = {name: _completed(preset) for name, preset in PRESETS.items()}
DEFAULT_PRESET = "unspool"
ORDER = PRESETS[DEFAULT_PRESET].stages
# Each stage and the parameters that turn it on. `top_k_ties` is top-k that keeps every token tied with the k-th.
STAGES: dict[str, tuple[str, ...]] = {
    name: tuple(parameter.name for parameter in PARAMETERS if SPECS[name] in parameter.stages)
    for name in (*ORDER, *(name for name in SPECS if name not in ORDER))
}


def check_order(order: object) -> str | tuple[Stage, ...] | None:
    """A preset's name or a list of stage names and callables; anything else raises, naming what is unknown."""
    if order is None:
        return None
    if isinstance(order, str):
        known = ", ".join(PRESETS)
        if order not in PRESETS:
            raise RequestError(f"order is {order!r}{nearest(order, PRESETS, f'the presets are {known}')}", "order")
        return order
    if not isinstance(order, Sequence):
        raise RequestError(f"order is {order!r}; it must be a preset's name or a list of stages", "order")
    names = [stage for stage in order if isinstance(stage, str)]
    for stage in order:
        if not isinstance(stage, str) and not callable(stage):
            raise RequestError(f"order holds {stage!r}; a stage is a name or a function (row, state) -> row", "order")
        if isinstance(stage, str) and stage not in STAGES:
            hint = nearest(stage, STAGES, f"they are {', '.join(STAGES)}")
            raise RequestError(f"order holds {stage!r}, which is no stage{hint}", "order")
        if isinstance(stage, str) and names.count(stage) > 1:
            raise RequestError(f"order holds {stage!r} {names.count(stage)} times; a stage comes once", "order")
    if "top_k" in names and "top_k_ties" in names:
        raise RequestError("order holds both top_k and top_k_ties; they are one stage with two rules for ties", "order")
    return tuple(order)


def preset_of(order: str | tuple[Stage, ...] | None) -> Preset:
    """The preset whose penalty rules hold: the named one, or ours for a list of one's own."""
    return PRESETS[order if isinstance(order, str) else DEFAULT_PRESET]

"""How rows choose experts: the numbers that an architecture fixes, and their meaning in numpy."""

from __future__ import annotations

from typing import Any, Literal

from unspool.lazy import np
from unspool.records import record

Scoring = Literal["softmax", "sigmoid"]


@record(frozen=True)
class Routing:
    """Which experts a row uses, and with which weights. Both depend on that row's router logits alone.

    Scores are a softmax over all logits, or a sigmoid of each. A row uses the experts with the highest scores;
    `choice_bias` is added for this choice only, and of equal scores the lower expert number wins. If experts are in
    groups, the best groups are chosen first, by the sum of their `group_top` best scores. Weights are the scores of the
    chosen experts: divided by their sum if they are normalized, times `scale`, and times the expert's own scale if
    there is one.
    """

    num_experts: int
    num_used: int
    scoring: Scoring = "softmax"
    normalized: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_used_groups: int = 1
    group_top: int = 2
    choice_bias: Any = None  # the backend's vector with one number per expert, or None
    expert_scale: Any = None


def expected_experts(routing: Routing, rows: float) -> float:
    """The expected number of different experts that `rows` rows use together, if each row chooses at random."""
    return routing.num_experts * (1 - (1 - routing.num_used / routing.num_experts) ** rows)


def choose_experts(logits: np.ndarray, routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    """For rows of logits [row, expert]: the experts that each row uses, best first, and their float32 weights."""
    logits = logits.astype(np.float32)
    if routing.scoring == "softmax":
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    choice = scores if routing.choice_bias is None else scores + np.asarray(routing.choice_bias, np.float32)
    if routing.num_groups > 1:
        groups = choice.reshape(len(choice), routing.num_groups, -1)
        best = np.sort(groups, axis=2)[:, :, -routing.group_top :].sum(axis=2)
        used = np.argsort(-best, axis=1, kind="stable")[:, : routing.num_used_groups]
        closed = np.ones(best.shape, bool)
        np.put_along_axis(closed, used, False, axis=1)
        choice = np.where(closed[:, :, None], -np.inf, groups).reshape(choice.shape)
    chosen = np.argsort(-choice, axis=1, kind="stable")[:, : routing.num_used]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if routing.normalized:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
    weights = weights * np.float32(routing.scale)
    if routing.expert_scale is not None:
        weights = weights * np.asarray(routing.expert_scale, np.float32)[chosen]
    return chosen, weights.astype(np.float32)

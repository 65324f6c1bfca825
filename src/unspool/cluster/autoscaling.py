"""How many replicas there should be: by the requests that run or wait, and by how full the caches are."""

from __future__ import annotations

import math
from typing import Any

FULL, EMPTY = 0.9, 0.5  # shares of a cache in use above which it needs relief, and below which one may go


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's interface: the number of replicas, and what is to be remembered (nothing)."""
    config = context.config
    target = config.target_ongoing_requests if config is not None else 1.0
    usage = _mean(context.aggregated_metrics or {}, "cache_usage")
    wanted = num_replicas(context.total_num_requests, target, context.current_num_replicas, usage)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(high, wanted)), {}


def num_replicas(requests: float, target: float, current: int, cache_usage: float | None) -> int:
    """One for each `target` requests. Where the caches are full, one more than there are; and none goes before they
    are half empty, since its requests would move to caches that have no room."""
    wanted = max(1, math.ceil(requests / target))
    if cache_usage is not None and current > 0:
        if cache_usage > FULL:
            return max(wanted, current + 1)
        if cache_usage > EMPTY:
            return max(wanted, current)
    return wanted


def _mean(metrics: dict[str, dict[Any, float]], name: str) -> float | None:
    values = list(metrics.get(name, {}).values())
    return sum(values) / len(values) if values else None

"""unspool tune: which sampling settings do best on prompts of your own."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    from unspool.evaluation import tune

    return tune.main(argv)

"""unspool tune: which sampling settings work best on your own prompts."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.cli.parser import our_manners


def main(argv: Sequence[str]) -> int:
    from unspool.evaluation import tune

    with our_manners():
        return tune.main(argv)

"""What a mistyped name may have meant."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 80  # characters of a name that is compared; a longer one is no typing mistake


def nearest(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """`; did you mean …?` for a name that is like a known one, else `; ` and something else to say."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1, cutoff=cutoff) if len(name) <= LONGEST else []
    return f"; did you mean {close[0]!r}?" if close else f"; {otherwise}" if otherwise else ""

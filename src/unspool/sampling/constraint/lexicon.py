"""Questions about terminals of a grammar, answered by compiling them alone over an alphabet of bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

from unspool.sampling.constraint import native
from unspool.sampling.constraint.limits import Budget, Limits, Refused
from unspool.sampling.constraint.vocabulary import Vocabulary

_COST = 3_000  # of one question, in steps of the budget
_FUEL = 200_000  # of one question: about 4 ms
_NOTHING = "no text can follow"


class _Bytes:
    """A tokenizer whose tokens are the 256 bytes and an end."""

    vocab_size = 257
    special_ids = frozenset({256})
    eos_ids = frozenset({256})
    fingerprint = "bytes"

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<end>"

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())


@cache
def _vocabulary() -> Vocabulary:
    return Vocabulary(_Bytes())


class Lexicon:
    """Questions asked while one schema is compiled; what was compiled for them is kept."""

    def __init__(self, limits: Limits, budget: Budget) -> None:
        self._limits = replace(limits, lexer_fuel=min(_FUEL, limits.lexer_fuel), step_fuel=min(_FUEL, limits.step_fuel))
        self._budget = budget
        self._compiled: dict[str, Any] = {}

    def is_empty(self, terminal: str) -> bool:
        """Whether no text matches."""
        return self._matcher(terminal) is None

    def matches(self, terminal: str, text: str) -> bool:
        """Whether this whole text matches."""
        self._budget.spend(50)
        root = self._matcher(terminal)
        if root is None:
            return False
        matcher, data = root.deep_copy(), list(text.encode())
        if matcher.validate_tokens(data) < len(data):
            return False
        return bool((not data or matcher.consume_tokens(data)) and matcher.is_accepting())

    def _matcher(self, terminal: str) -> Any:
        """None where nothing matches."""
        if terminal not in self._compiled:
            self._budget.spend(_COST)
            text = json.dumps({"grammars": [{"lark_grammar": f"start: T\nT: {terminal}"}]})
            root = native.build_small(text, _vocabulary(), self._limits)
            problem = native.problem(root)
            if problem not in ("", _NOTHING):
                raise Refused("pattern, format and lengths are too intricate together")
            self._compiled[terminal] = None if problem else root
        return self._compiled[terminal]

"""Constraints: answers that match a JSON Schema, an expression, one of several strings, or a grammar.

    constraint ─► grammar.source: checked, rewritten ─► llguidance: compiled ─► Matcher: one answer's progress
                  (Python, bounded)                      (native, bounded)       (masks in microseconds)

`compile_constraint` is a pure function that threads may call at once; the compiled form is kept for the next request
with the same constraint. docs/constraints.md says what is supported.
"""

from unspool.sampling.constraint.compile import compile_async, compile_constraint
from unspool.sampling.constraint.limits import DEFAULT, Limits
from unspool.sampling.constraint.matcher import Matcher
from unspool.sampling.constraint.thinking import ThinkingMatcher

__all__ = ["DEFAULT", "Limits", "Matcher", "ThinkingMatcher", "compile_async", "compile_constraint"]

"""llguidance's compiler, called so that it can neither take the process along nor work for ever."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from unspool.sampling.constraint.limits import Limits
from unspool.sampling.constraint.matcher import short_reason
from unspool.sampling.constraint.vocabulary import Vocabulary

_STACK_BYTES = 256 * 2**20  # reserved, not used: some 5 kB for each definition within another
_stack_lock = threading.Lock()


def build(text: str, words: Vocabulary, limits: Limits) -> Any:
    """A matcher that has followed nothing. llguidance recurses into definitions, one within another, and a stack that
    overflows ends the whole process: it is given a stack that holds as many as a constraint can have."""
    made: Future[Any] = Future()

    def work() -> None:
        try:
            made.set_result(build_small(text, words, limits))
        except BaseException as error:
            made.set_exception(error)

    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=work, name="constraint-build").start()
        finally:
            threading.stack_size(before)
    return made.result()


def build_small(text: str, words: Vocabulary, limits: Limits) -> Any:
    """The same for a grammar whose definitions do not stand within one another."""
    import llguidance

    bounds = llguidance.LLParserLimits(
        max_items_in_row=limits.row_items,
        initial_lexer_fuel=limits.lexer_fuel,
        step_lexer_fuel=limits.step_fuel,
        step_max_items=limits.step_items,
        max_lexer_states=limits.lexer_states,
        max_grammar_size=limits.grammar_size,
        verbose_errors=False,
    )
    return llguidance.LLMatcher(words.native, text, log_level=0, limits=bounds)


def problem(root: Any) -> str:
    """Why a matcher cannot be used; empty if it can: it compiled, and something can follow from its start."""
    if root.is_error():
        return short_reason(root.get_error())
    first = root.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        return short_reason(first.get_error())
    return "nothing matches" if first.is_stopped() and not first.is_accepting() else ""

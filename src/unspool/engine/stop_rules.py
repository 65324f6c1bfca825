"""A request's own stop rules, asked after each token of one of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unspool.errors import RequestError
from unspool.params.rules import StopRule, StopState, name_of
from unspool.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from unspool.text.tokenizer import Tokenizer


class StopRules:
    def __init__(
        self,
        rules: Sequence[StopRule],
        prompt: tuple[int, ...],
        tokenizer: Tokenizer | None,
        continued_ids: Sequence[int] = (),
        *,
        skip_special: bool = True,
    ) -> None:
        self._rules, self._prompt, self._tokenizer = rules, prompt, tokenizer
        self._continued_ids, self._skip_special = continued_ids, skip_special
        self.reset()

    def reset(self) -> None:
        """Rebuild the text after the answer was rewound to an earlier token."""
        self._text, self._num_seen = "", 0
        self._detokenizer = None
        if self._tokenizer is not None:
            self._detokenizer = Detokenizer(
                self._tokenizer, prompt_ids=self._continued_ids, skip_special=self._skip_special
            )

    def first_met(self, output: Sequence[int]) -> str | None:
        """The name of the first rule that ends the answer here. A RequestError names one that fails."""
        if self._detokenizer is not None:
            self._text += "".join(map(self._detokenizer.push, output[self._num_seen :]))
        self._num_seen = len(output)
        state = StopState(self._prompt, tuple(output), self._text)
        return next((name_of(rule) for rule in self._rules if _says_stop(rule, state)), None)


def _says_stop(rule: StopRule, state: StopState) -> bool:
    try:
        answer = rule(state)
    except Exception as error:
        message = f"stop rule {name_of(rule)} raised {type(error).__name__}: {error}"
        raise RequestError(message, "stop_rules") from error
    if type(answer).__name__ not in ("bool", "bool_"):  # numpy's too
        raise RequestError(f"stop rule {name_of(rule)} returned {answer!r:.80}; expected True or False", "stop_rules")
    return bool(answer)

"""What a sampling stage and a stop rule of one's own are: functions of what an answer holds so far.

Both belong to one request. They are asked the same questions alone, in a batch, with drafts and without, so an answer
stays a function of the weights, the prompt, the parameters and the seed as long as they are functions themselves: the
same arguments, the same result. One that keeps something between calls breaks that for its own request alone. If one
raises, its request fails with a RequestError that names it; the others go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from unspool.records import record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from unspool.params.sampling import ResolvedParams


@record(frozen=True)
class StageState:
    """What a stage may look at besides its row; the arrays are views and must not be written."""

    prompt_ids: NDArray[np.int32]
    output_ids: NDArray[np.int32]
    position: int  # of the token that is to be chosen, prompt and output counted together
    params: ResolvedParams


class LogitStage(Protocol):
    """A sampling stage, anywhere in `order`. The row has a logit for each token of the vocabulary, minus infinity where
    a token is ruled out; it is a copy, which the stage may change and return.

    >>> from unspool import PRESETS, LLM
    >>> def only_even(row, state):
    ...     row[1::2] = float("-inf")
    ...     return row
    >>> result = LLM().generate("Count:", order=[only_even, *PRESETS["unspool"].stages], max_tokens=4, seed=1)
    >>> all(token % 2 == 0 for token in result.token_ids)
    True
    """

    def __call__(self, row: NDArray[np.float32], state: StageState, /) -> NDArray[np.float32]: ...


Stage = str | LogitStage  # one of `order`: ours by name, or one's own


@record(frozen=True)
class StopState:
    """What a stop rule sees: an answer up to its newest token, that one included."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str  # of the output, as far as its characters are whole


class StopRule(Protocol):
    """Whether an answer ends here. It is asked after every token that does not end the answer anyway; the token stays
    in the answer, whose `finish_reason` is "stop" and whose `stop` is the rule's name.

    >>> from unspool import LLM
    >>> def two_sentences(state):
    ...     return state.text.count(".") >= 2
    >>> result = LLM().generate("The sea", stop_rules=two_sentences, max_tokens=200, temperature=0)
    >>> result.text.count("."), result.choices[0].stop
    (2, 'two_sentences')
    """

    def __call__(self, state: StopState, /) -> bool: ...


def name_of(rule: object) -> str:
    """A function's name, or that of an object's class."""
    return getattr(rule, "__name__", None) or type(rule).__name__

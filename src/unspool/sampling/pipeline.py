"""From a row of logits to a token: the stages in their order, then the draw.

    logits ─► bias · allowed · constraint · penalties ─► temperature · filters ─► draw ─► Choice
              (touch few tokens: numpy, or a mask)       (every token: native backend, or the numpy reference)

A Sampler belongs to one running sequence. `choose` changes nothing, `accept` commits, `rewind` undoes. A choice is a
function of the logits, the position and the accepted tokens, never of another row or of the number of `choose` calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from unspool.errors import RequestError, SamplingError
from unspool.lazy import lazy, np
from unspool.params import ResolvedParams
from unspool.params.order import DRAW_STAGES, SPECS, STAGES
from unspool.params.resolve import is_on
from unspool.sampling import native as fast
from unspool.sampling.state import History

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from unspool.params.rules import LogitStage, Stage
    from unspool.sampling import draw, filters, penalties, trace
    from unspool.sampling.draw import F32
    from unspool.sampling.trace import Recorded, StepTrace
else:  # these import numpy, which most answers do not need with the native backend
    names = ("draw", "filters", "penalties", "trace")
    draw, filters, penalties, trace = (lazy(f"unspool.sampling.{name}") for name in names)


class Matcher(Protocol):
    """A constraint's progress through one answer. Bit t of the mask is 1 where token t may come next."""

    @property
    def is_finished(self) -> bool: ...

    def check(self, token: int) -> bool: ...

    def mask(self) -> NDArray[np.uint32] | None: ...

    def accept(self, token: int) -> None: ...

    def rollback(self, n: int) -> None: ...

    def fork(self) -> Matcher: ...

    def forced(self) -> list[int]: ...


class Choice(NamedTuple):  # one for each token: the cheapest to construct
    """A token, with the requested reports. Without logprobs, `logprob` is NaN and `rank` None."""

    token: int
    logprob: float
    rank: int | None
    top: tuple[tuple[int, float], ...]
    trace: StepTrace | None = None


class Sampler:
    """Chooses the tokens of one sequence."""

    def __init__(
        self,
        params: ResolvedParams,
        *,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_ids: frozenset[int],
        seed: int | None = None,
        native: bool = True,
        constraint: Matcher | None = None,
        dry_breakers: NDArray[np.bool_] | None = None,
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.seed = params.seed if seed is None else seed
        self.constraint = constraint
        self.history = History(params, prompt_ids)
        self._end_ids = end_ids
        self._dry_breakers = dry_breakers  # by token id: True if the text contains a sequence breaker
        self._banned: dict[int, list[int]] = {}
        self._stages = stages_on(params, constraint)
        self._native = fast.native_sampling() if native and not params.trace else None
        self._front, self._tail = _split(self._stages)
        self._fast = None if self._native is None or self._tail is None else fast.Tail(self._native, self._tail, params)
        self._reports = params.logprobs is not None or params.best_of > params.n or params.trace
        self._reports_final = self._reports and params.logprobs_stage == "final"
        # The winner of an unmasked row is also the masked row's winner, if the mask allows it and no stage between mask
        # and draw depends on other tokens. Filters do: after masking, a token may survive that did not before.
        narrow = all(
            isinstance(stage, str) and (stage == "temperature" or stage not in DRAW_STAGES) for stage in self._stages
        )
        self._check_first = constraint is not None and narrow and not params.trace and not self._reports_final
        self._has_fast_path = self._fast is not None and not self._front and not self._reports

    @property
    def num_output(self) -> int:
        return self.history.num_output

    @cached_property
    def end_ids(self) -> NDArray[np.int32]:
        return np.array(sorted(self._end_ids), np.int32)

    @cached_property
    def _bias(self) -> tuple[NDArray[np.int32], F32]:
        bias = self.params.logit_bias
        return np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)

    @cached_property
    def _refused(self) -> NDArray[np.int32] | None:
        return _all_but(self.params.allowed_token_ids, self.vocab_size)

    def choose(self, logits: F32 | memoryview[float], position: int) -> Choice:
        """The token for this position of the sequence (prompt and output counted together); commits nothing."""
        if self._has_fast_path and self._fast is not None and not self._banned and len(logits) == self.vocab_size:
            token, _ = self._fast.pick(logits, self.seed, position, False)
            if token >= 0:
                return Choice(token, math.nan, None, ())
        logits = np.asarray(logits)
        self._check_row(logits)
        recorded: list[Recorded] | None = [] if self.params.trace else None
        token, final = self._pick(logits, position, recorded, masked=not self._check_first)
        if self._check_first and self.constraint is not None and not self.constraint.check(token):
            token, final = self._pick(logits, position, recorded, masked=True)
        return self._report(logits, final, token, position, recorded)

    def scores(self, logits: F32 | memoryview[float], position: int) -> F32:
        """Every token's log-probability after the masks and penalties, which a beam search adds up.

        As in transformers' beam search, penalties act on log-probabilities, which are not renormalized.
        """
        logits = np.asarray(logits)
        self._check_row(logits)
        _check_alive(logits, position)
        stats, _, _ = fast.describe(logits, 0, 0, self._native)
        row = self._without_banned(logits) + np.float32(stats.logprob(0.0))
        for stage in self._stages:
            if not _shapes_draw(stage):
                row = self._apply(stage, row, position, mine=True)
        _check_alive(row, position)
        return row

    def accept(self, token: int) -> None:
        if self.constraint is not None:
            self.constraint.accept(token)
        self.history.push(token)

    def rewind(self, num_output: int) -> None:
        """Go back to this many accepted output tokens; drops bans at later positions."""
        undone = self.num_output - num_output
        if undone < 0 or num_output < 0:
            raise ValueError(f"cannot rewind to {num_output} output tokens; there are {self.num_output}")
        if self.constraint is not None and undone:
            self.constraint.rollback(undone)
        self.history.rewind(num_output)
        self._banned = {place: tokens for place, tokens in self._banned.items() if place <= num_output}

    def ban(self, token: int) -> None:
        """Never choose this token at the next position (until a rewind to before it)."""
        self._banned.setdefault(self.num_output, []).append(token)

    def fork(self, seed: int | None = None, *, reports: bool = True) -> Sampler:
        """A copy that continues independently from here. Without `reports`, it gives only the same tokens."""
        twin = object.__new__(Sampler)
        twin.__dict__.update(self.__dict__)
        if not reports:
            twin._reports = twin._reports_final = False
        twin.seed = self.seed if seed is None else seed
        twin.history = self.history.fork()
        twin.constraint = None if self.constraint is None else self.constraint.fork()
        twin._banned = {place: list(tokens) for place, tokens in self._banned.items()}
        return twin

    def _check_row(self, logits: F32) -> None:
        if logits.shape != (self.vocab_size,) or logits.dtype != np.float32:
            raise ValueError(f"logits are {logits.dtype}{logits.shape}; expected float32 ({self.vocab_size},)")

    def _pick(
        self, logits: F32, position: int, recorded: list[Recorded] | None, *, masked: bool
    ) -> tuple[int, F32 | None]:
        """The token, and the row that it was drawn from if that is reported."""
        row = self._without_banned(logits)
        if self._fast is None:
            _check_alive(row, position)
        for stage in self._stages if self._fast is None else self._front:
            if stage == "constraint" and not masked:
                continue
            # A row that is already a copy may be written in place, unless a trace keeps it.
            mine = row is not logits and recorded is None
            before, row = row, self._apply(stage, row, position, mine)
            if self._fast is None:
                _check_alive(row, position)
            if recorded is not None and (row is not before or _shapes_draw(stage)):
                recorded.append(trace.Recorded(_name(stage), self._value(stage, position), before, row))
        if self._fast is None:
            return (draw.greedy(row) if self.params.greedy else draw.draw(row, self.seed, position)), row
        token, final = self._fast.pick(row, self.seed, position, self._reports_final)
        if token < 0:
            raise no_token(token, position)
        return token, final

    def _without_banned(self, row: F32) -> F32:
        banned = self._banned.get(self.num_output)
        return row if banned is None else _patched(row, np.array(banned, np.int32), filters.REMOVED, False)

    def _apply(self, stage: Stage, row: F32, position: int, mine: bool) -> F32:
        """The row after a stage: written in place if it is `mine`, else the same object only if nothing changed."""
        if not isinstance(stage, str):
            return self._custom(stage, row, position)
        params, history = self.params, self.history
        match stage:
            case "bias":
                ids, bias = self._bias
                return _patched(row, ids, penalties.bias(row[ids], bias), mine)
            case "allowed":
                row = row if self._refused is None else _patched(row, self._refused, filters.REMOVED, mine)
                early = self.num_output < params.min_tokens and self.end_ids.size > 0
                return _patched(row, self.end_ids, filters.REMOVED, mine) if early else row
            case "constraint":
                mask = None if self.constraint is None else self.constraint.mask()
                return row if mask is None else self._masked(row, mask, mine)
            case "repetition" if history.repeated is not None:
                ids, counts = history.repeated.ids, history.repeated.counts
                return _patched(row, ids, penalties.repetition(row[ids], counts, params.repetition_penalty), mine)
            case "frequency" if history.frequent is not None:
                ids, counts = history.frequent.ids, history.frequent.counts
                return _patched(row, ids, penalties.frequency(row[ids], counts, params.frequency_penalty), mine)
            case "presence" if history.frequent is not None:
                ids, counts = history.frequent.ids, history.frequent.counts
                return _patched(row, ids, penalties.presence(row[ids], counts, params.presence_penalty), mine)
            case "dry":
                return self._dry(row, mine)
            case "no_repeat_ngram":
                followers = penalties.ngram_followers(history.tokens, params.no_repeat_ngram)
                return _patched(row, followers, filters.REMOVED, mine)
            case "xtc":
                acts = draw.xtc_uniform(self.seed, position) < params.xtc_probability
                return filters.xtc(row, params.xtc_threshold) if acts else row
            case _:
                function = SPECS[stage].function or getattr(filters, stage)
                changed: F32 = function(row, getattr(params, STAGES[stage][0]))
                return changed

    def _dry(self, row: F32, mine: bool) -> F32:
        params = self.params
        tokens = self.history.tokens
        seen = tokens if params.dry_window < 0 else tokens[-params.dry_window :]
        rule = params.dry_multiplier, params.dry_base, params.dry_allowed_length
        ids, lengths = penalties.dry_matches(seen, self._dry_breakers, *rule)
        return _patched(row, ids, penalties.dry(row[ids], lengths, *rule), mine)

    def _masked(self, row: F32, mask: NDArray[np.uint32], mine: bool) -> F32:
        if self._native is None:
            bits = np.unpackbits(mask.view(np.uint8), count=row.size, bitorder="little")
            return np.where(bits == 1, row, filters.REMOVED)
        row = row if mine else row.copy()
        short = (row.size + 31) // 32 - mask.size
        # A model's rows may be longer than its tokenizer's vocabulary; ids without text are not allowed.
        self._native.mask(row, np.pad(mask, (0, short)) if short > 0 else mask)
        return row

    def _custom(self, stage: LogitStage, row: F32, position: int) -> F32:
        from unspool.params.rules import StageState

        history = self.history
        tokens = history.tokens
        state = StageState(tokens[: history.num_prompt], tokens[history.num_prompt :], position, self.params)
        try:
            result = stage(row.copy(), state)
        except Exception as error:
            raise RequestError(f"stage {_name(stage)} raised {type(error).__name__}: {error}", "order") from error
        if not isinstance(result, np.ndarray) or result.shape != row.shape or result.dtype != np.float32:
            was = f"{result.dtype}{result.shape}" if isinstance(result, np.ndarray) else repr(type(result).__name__)
            raise RequestError(f"stage {_name(stage)} returned {was}; expected float32 {row.shape}", "order")
        if np.isnan(result).any() or result.max() == np.inf:
            raise RequestError(f"stage {_name(stage)} returned NaN or infinite logits", "order")
        return result

    def _value(self, stage: Stage, position: int) -> Any:
        """The value of a stage's parameter, for a trace."""
        if not isinstance(stage, str):
            return None
        params = self.params
        match stage:
            case "allowed":
                return {"allowed_token_ids": params.allowed_token_ids, "min_tokens": params.min_tokens}
            case "dry":
                rule = params.dry_multiplier, params.dry_base, params.dry_allowed_length
                return dict(zip(("multiplier", "base", "allowed_length"), rule, strict=True))
            case "xtc":
                drawn = draw.xtc_uniform(self.seed, position)
                return {"probability": params.xtc_probability, "threshold": params.xtc_threshold, "drawn": drawn}
        return getattr(params, STAGES[stage][0])

    def _report(
        self, logits: F32, final: F32 | None, token: int, position: int, recorded: list[Recorded] | None
    ) -> Choice:
        if not self._reports:
            return Choice(token, math.nan, None, ())
        row = final if self._reports_final and final is not None else logits
        count = self.params.logprobs or 0
        stats, rank, best = fast.describe(row, token, count, self._native)
        top = tuple((other, stats.logprob(row[other])) for other in best)
        steps = None
        if recorded is not None and final is not None:
            params = self.params
            steps = trace.step_trace(
                logits,
                recorded,
                final,
                token,
                position,
                seed=self.seed,
                greedy=params.greedy,
                top=params.trace_top,
                also=params.trace_tokens,
            )
        return Choice(token, stats.logprob(row[token]), rank, top, steps)


def stages_on(params: ResolvedParams, constraint: Matcher | None) -> tuple[Stage, ...]:
    """The active stages of the order. A greedy choice skips stages that only shape a draw."""

    def on(stage: Stage) -> bool:
        if not isinstance(stage, str):
            return True
        if stage == "constraint":
            return constraint is not None
        if params.greedy and stage in DRAW_STAGES:
            return False
        return any(is_on(name, getattr(params, name)) for name in STAGES[stage])

    return tuple(stage for stage in params.order if on(stage))


def draws_in_turn(params: ResolvedParams) -> bool:
    """Whether a draw depends on earlier ones, so that the draws of a draft cannot be made together."""
    penalties = (params.repetition_penalty != 1, params.frequency_penalty != 0, params.presence_penalty != 0)
    return any(penalties) or params.min_tokens > 0


def _split(stages: tuple[Stage, ...]) -> tuple[tuple[Stage, ...], tuple[str, ...] | None]:
    """The stages before the temperature and the filters, and these; None if numpy must run all of them."""
    start = next((i for i, stage in enumerate(stages) if _shapes_draw(stage)), len(stages))
    tail = tuple(stage for stage in stages[start:] if isinstance(stage, str) and _shapes_draw(stage))
    is_native = len(tail) == len(stages) - start and all(stage in fast.CODES for stage in tail)
    return stages[:start], tail if is_native else None


def _shapes_draw(stage: Stage) -> bool:
    return isinstance(stage, str) and stage in DRAW_STAGES


def _check_alive(row: F32, position: int) -> None:
    highest = row.max()  # NaN if any logit is NaN
    if not np.isfinite(highest):
        answer = fast.HAS_NAN if np.isnan(highest) else fast.HAS_INFINITY if highest > 0 else fast.NONE_LEFT
        raise no_token(answer, position)


def no_token(answer: int, position: int) -> SamplingError | RequestError:
    """The error when no token was chosen: invalid logits, or parameters of the request that leave no token."""
    if answer == fast.HAS_NAN:
        return SamplingError(f"the model gave NaN logits at position {position:,}")
    if answer == fast.HAS_INFINITY:
        return SamplingError(f"the model gave infinite logits at position {position:,}")
    message = f"no token may be chosen at position {position:,}: the request's parameters rule out every one"
    return RequestError(message, code="no_token_allowed")


def _name(stage: Stage) -> str:
    if isinstance(stage, str):
        return stage
    from unspool.params.rules import name_of

    return name_of(stage)


def _all_but(allowed: tuple[int, ...] | None, vocab_size: int) -> NDArray[np.int32] | None:
    if allowed is None:
        return None
    refused = np.ones(vocab_size, bool)
    refused[list(allowed)] = False
    return np.flatnonzero(refused).astype(np.int32)


def _patched(row: F32, ids: NDArray[np.int32], values: F32 | np.float32, mine: bool) -> F32:
    if ids.size == 0:
        return row
    row = row if mine else row.copy()
    row[ids] = values
    return row

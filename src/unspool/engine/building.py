"""From a prompt and its parameters to a group of branches: what a request is, before anything of it is computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from unspool.cache.blocks import root_key
from unspool.engine.beams import BeamGroup
from unspool.engine.branch import Branch, Clock
from unspool.engine.group import Group, branch_seed
from unspool.engine.outcome import Ending, Outcome
from unspool.engine.request import Pooling, Request
from unspool.errors import ContextLengthError, RequestError
from unspool.events import Token
from unspool.lazy import np
from unspool.params import ResolvedParams, SamplingParams
from unspool.sampling.beam import BeamSearch
from unspool.text.assembler import Assembler, MatchingAssembler, TextAssembler

if TYPE_CHECKING:
    from unspool.config import EngineConfig
    from unspool.engine.runner import Runner
    from unspool.engine.stop_rules import StopRules
    from unspool.models.checkpoint import Checkpoint
    from unspool.speculate.speculation import Speculation
    from unspool.text.tokenizer import Tokenizer


MAX_TABLES = 16  # of sequence breakers that are kept: requests choose them


def check_length(num_prompt: int, max_tokens: int | None, limit: int, field: str = "max_tokens") -> None:
    """Refuse an answer that cannot become as long as was asked for; `field` is the caller's name for `max_tokens`."""
    total = num_prompt + (max_tokens or 0)
    if num_prompt < limit < total:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens. The prompt has {num_prompt} and {field} is "
            f"{max_tokens}: {total} together",
            field,
        )


def turns_of(prompt: Sequence[int], control: Collection[int]) -> tuple[int, ...]:
    """Where the parts of a conversation begin and end: at the control tokens that its template has put there. The next
    turn's prompt parts from this one at one of them, whatever the template leaves out of earlier answers."""
    return tuple(at for at in range(1, len(prompt)) if prompt[at] in control and prompt[at - 1] not in control)


class GroupBuilder:
    """Checks what a request asks for and builds its group."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        runner: Runner,
        speculation: Speculation,
        tokenizer: Tokenizer | None,
        context_length: int,
        end_ids: frozenset[int],
    ) -> None:
        self._runner, self._speculation, self._tokenizer = runner, speculation, tokenizer
        self._fingerprint, self._vocab_size = checkpoint.fingerprint, checkpoint.config.vocab_size
        self._model_context, self._context_length = checkpoint.config.context_length, context_length
        self._drafter, self._end_ids = config.speculate, end_ids
        has_window = any(group.window is not None for group in runner.kv.groups)
        self._keeps_turns = runner.kv.state_bytes > 0 or has_window
        self._breaker_tables: dict[tuple[str, ...], np.ndarray] = {}
        self.next_number = 0

    def build(
        self,
        id: str,
        prompt: tuple[int, ...],
        params: ResolvedParams,
        arrived: float,
        is_chat: bool,
        pooling: Pooling | None = None,
    ) -> Group:
        if pooling is not None:
            self._check_pooling(params)
        kind = Group if params.beam is None else BeamGroup
        group = kind(id, prompt, params, arrived=arrived, matcher=self._compile(params), is_chat=is_chat)
        for choice in range(params.best_of if params.beam is None else 1):
            self._add_branch(group, choice)
        group.branches[0].request.pooling = pooling
        if isinstance(group, BeamGroup):
            self._prepare_search(group)
        return group

    def _check_pooling(self, params: ResolvedParams) -> None:
        if params.max_tokens != 0:
            raise RequestError(f"max_tokens is {params.max_tokens}; a pooled prompt takes 0", "max_tokens")
        if params.best_of > 1 or params.beam is not None or params.prompt_logprobs is not None:
            raise RequestError("a pooled prompt has no answers, beams or prompt logprobs", "pooling")
        self._runner.hidden_step()  # refused by name where the device has no hidden rows

    def check(self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> None:
        vocab_size, limit = self._vocab_size, self._context_length
        if not prompt:
            raise RequestError("the prompt has no tokens; give at least one", "prompt")
        for name, tokens in (("prompt", prompt), ("output", output)):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"the {name} has token {token}; the vocabulary has {vocab_size:,}", name)
        if len(prompt) + len(output) >= limit:
            message = f"This model's maximum context length is {limit} tokens"
            if limit < self._model_context:
                message += f" here (kv_tokens; {self._model_context} in the model itself)"
            size = f"it has {len(prompt)} tokens"
            raise ContextLengthError(f"the prompt is too long: {size}. {message}, at least one of them for the answer")
        check_length(len(prompt), params.max_tokens, limit)
        check_length(len(prompt), params.min_tokens, limit, "min_tokens")

    def _compile(self, params: ResolvedParams) -> Any:
        """What limits an answer's tokens: its constraint, and the budget of the thinking before it."""
        budget, thinking = params.thinking_budget, params.thinking_marks
        if budget is not None and thinking is None:
            raise RequestError(
                "thinking_budget needs thinking_marks, which only a chat knows by itself",
                "thinking_budget",
            )
        if params.constraint is None and budget is None:
            return None
        if self._tokenizer is None:
            name = "constraint" if params.constraint is not None else "thinking_budget"
            raise RequestError(f"{name} needs a tokenizer; this model was loaded without one", name)
        from unspool.sampling.constraint import ThinkingMatcher, compile_constraint

        answer = None if params.constraint is None else compile_constraint(params.constraint, self._tokenizer)
        return answer if thinking is None else ThinkingMatcher(thinking, budget, answer, self._tokenizer)

    def _dry_breakers(self, params: ResolvedParams) -> np.ndarray | None:
        """By token id: whether its text holds a sequence breaker. Looked up once for each set of breakers."""
        if not params.dry_multiplier or self._tokenizer is None:
            return None
        breakers = params.dry_sequence_breakers
        if breakers not in self._breaker_tables:
            if len(self._breaker_tables) >= MAX_TABLES:
                self._breaker_tables.clear()
            texts = (self._tokenizer.token_text(token) for token in range(self._vocab_size))
            self._breaker_tables[breakers] = np.array([any(b in text for b in breakers) for text in texts])
        return self._breaker_tables[breakers]

    def _add_branch(self, group: Group, choice: int) -> None:
        from unspool.sampling.pipeline import Sampler, draws_in_turn

        params, prompt = group.params, group.prompt
        sampler = Sampler(
            params,
            prompt_ids=prompt,
            vocab_size=self._vocab_size,
            end_ids=self._end_ids,
            seed=branch_seed(params.seed, choice),
            constraint=None if group.matcher is None else group.matcher.fork(),
            dry_breakers=self._dry_breakers(params),
        )
        max_output = self._context_length - len(prompt) if params.max_tokens is None else params.max_tokens
        branch = Branch(
            request=self._request(group, len(prompt) + max_output),
            choice=choice,
            params=params,
            sampler=sampler,
            assembler=self._make_assembler(group),
            clock=group.clock if isinstance(group, BeamGroup) else Clock(group.arrived),
            end_ids=frozenset() if params.ignore_eos else self._end_ids,
            max_output=max_output,
            speculate=self._speculation.choose(params, self._drafter),
            on_device=self._fits_device(params, max_output),
            draws_in_turn=draws_in_turn(params),
            rules=self._make_rules(group),
        )
        group.branches.append(branch)

    def _request(self, group: Group, limit: int) -> Request:
        params = group.params
        root = root_key(self._fingerprint, self._runner.kv.layout, params.cache_salt or "")
        request = Request(self.next_number, group.prompt, priority=params.priority, root=root)
        self.next_number += 1
        request.arrival = group.branches[0].request.arrival if group.branches else request.number
        request.limit = limit
        if group.is_chat and self._tokenizer is not None and self._keeps_turns:
            request.turns = turns_of(group.prompt, self._tokenizer.special_ids)
        request.is_scored = params.prompt_logprobs is not None and not group.branches
        return request

    def _fits_device(self, params: ResolvedParams, max_output: int) -> bool:
        """Whether the tokens of such a request can be chosen by the device alone."""
        return (
            params.beam is None
            and params.constraint is None
            and params.thinking_budget is None
            and not params.bad_words
            and params.prompt_logprobs is None
            and not params.trace
            and max_output > 0
            and self._runner.can_draw(params)
        )

    def _make_assembler(self, group: Group) -> Assembler:
        params = group.params
        if self._tokenizer is None:
            for name, strings in (("stop", params.stop), ("bad_words", params.bad_words)):
                if strings:
                    raise RequestError(f"{name} needs a tokenizer; this model was loaded without one", name)
            return Assembler()
        if not params.stop and not params.bad_words:
            return TextAssembler(self._tokenizer, group.continued_ids, skip_special=params.skip_special_tokens)
        return MatchingAssembler(
            self._tokenizer,
            group.continued_ids,
            stops=params.stop,
            include_stop=params.include_stop_str,
            banned=params.bad_words,
            skip_special=params.skip_special_tokens,
        )

    def _make_rules(self, group: Group) -> StopRules | None:
        params = group.params
        if not params.stop_rules:
            return None
        from unspool.engine.stop_rules import StopRules

        skip_special = params.skip_special_tokens
        return StopRules(
            params.stop_rules, group.prompt, self._tokenizer, group.continued_ids, skip_special=skip_special
        )

    def _prepare_search(self, group: BeamGroup) -> None:
        params, leader = group.params, group.branches[0]
        assert params.beam is not None
        if params.bad_words:
            raise RequestError("bad_words go back in an answer, which a beam cannot; use a constraint", "bad_words")
        if params.stop_rules:
            raise RequestError("stop_rules ask one answer at a time, and a beam search has several", "stop_rules")
        if params.speculate not in (None, "off"):
            raise RequestError("speculation checks draws, and a beam search makes none", "speculate")
        if params.trace:
            raise RequestError("trace explains draws, and a beam search makes none", "trace")
        end_ids = leader.end_ids | set(params.stop_token_ids)

        def ends(tokens: tuple[int, ...]) -> bool:
            if tokens[-1] in end_ids:
                return len(tokens) >= params.min_tokens
            if not params.stop or self._tokenizer is None:
                return False
            text = self._tokenizer.decode(tokens, prompt_ids=group.continued_ids)
            return any(stop in text for stop in params.stop)

        group.search = BeamSearch(params.beam, max_output=leader.max_output, num_end_ids=len(end_ids), ends=ends)
        group.make_assembler = lambda: self._make_assembler(group)

    def request_like(self, like: Request) -> Request:
        """A request for a branch that is to be forked from another."""
        request = Request(self.next_number, like.tokens, priority=like.priority, root=like.root)
        request.num_prompt, request.arrival = like.num_prompt, like.arrival
        self.next_number += 1
        return request


def seed_output(group: Group, output: Sequence[int]) -> list[tuple[Branch, Outcome]]:
    """Begin every branch of a group with the same tokens, as if they had been chosen; the text that this gives."""
    if isinstance(group, BeamGroup):
        raise RequestError("a beam search chooses its tokens from the first on; output cannot be given", "output")
    pieces: list[tuple[Branch, Outcome]] = []
    for branch in group.branches:
        branch.request.tokens.extend(output)
        for token in output:
            text, tokens, then = branch.take(Token(token))
            if then is not None:
                why = then.reason if isinstance(then, Ending) else "a banned string"
                raise RequestError(f"the given output ends the answer already ({why})", "output")
            pieces.append((branch, ([], text, tokens, None)))
    return pieces

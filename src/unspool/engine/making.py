"""From a prompt and its parameters to a group of branches: what a request is, before anything of it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unspool.cache.blocks import root_key
from unspool.engine.ahead import on_device
from unspool.engine.beams import BeamGroup
from unspool.engine.branch import Branch, Clock
from unspool.engine.group import Group, branch_seed
from unspool.engine.request import Request
from unspool.errors import ContextLengthError, RequestError
from unspool.events import Token
from unspool.lazy import np
from unspool.params import ResolvedParams, SamplingParams
from unspool.sampling.beam import BeamSearch
from unspool.text.assembler import Assembler, Piece, PlainAssembler

if TYPE_CHECKING:
    from unspool.engine.engine import Engine


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


class Maker:
    """Makes an engine's groups; they enter its scheduler elsewhere."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokenizer, self._vocab_size = engine.tokenizer, engine.checkpoint.config.vocab_size
        self._fingerprint = engine.checkpoint.fingerprint
        self._breaker_tables: dict[tuple[str, ...], np.ndarray] = {}
        self.next_number = 0

    def group(self, id: str, prompt: tuple[int, ...], params: ResolvedParams, arrived: float, is_chat: bool) -> Group:
        kind = Group if params.beam is None else BeamGroup
        group = kind(id, prompt, params, arrived=arrived, matcher=self._compile(params), is_chat=is_chat)
        for choice in range(params.best_of if params.beam is None else 1):
            self._add_branch(group, choice)
        if isinstance(group, BeamGroup):
            self._prepare_search(group)
        return group

    def check(self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> None:
        vocab_size, engine = self._vocab_size, self._engine
        if not prompt:
            raise RequestError("the prompt has no tokens; give at least one", "prompt")
        for name, tokens in (("prompt", prompt), ("output", output)):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"the {name} has token {token}; the vocabulary has {vocab_size:,}", name)
        if len(prompt) + len(output) >= engine.context_length:
            limit = f"This model's maximum context length is {engine.context_length} tokens"
            if engine.context_length < engine.checkpoint.config.context_length:
                limit += f" here (kv_tokens; {engine.checkpoint.config.context_length} in the model itself)"
            size = f"it has {len(prompt)} tokens"
            raise ContextLengthError(f"the prompt is too long: {size}. {limit}, at least one of them for the answer")
        check_length(len(prompt), params.max_tokens, engine.context_length)
        check_length(len(prompt), params.min_tokens, engine.context_length, "min_tokens")

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

        engine, params, prompt = self._engine, group.params, group.prompt
        root = root_key(self._fingerprint, engine.runner.kv.layout, params.cache_salt or "")
        request = Request(self.next_number, prompt, priority=params.priority, root=root)
        self.next_number += 1
        request.arrival = group.branches[0].request.arrival if group.branches else request.number
        end_ids: frozenset[int] = frozenset() if params.ignore_eos else engine.end_ids
        sampler = Sampler(
            params,
            prompt_ids=prompt,
            vocab_size=self._vocab_size,
            end_ids=engine.end_ids,
            seed=branch_seed(params.seed, choice),
            constraint=None if group.matcher is None else group.matcher.fork(),
            dry_breakers=self._dry_breakers(params),
        )
        room = engine.context_length - len(prompt)
        branch = Branch(
            request=request,
            choice=choice,
            params=params,
            sampler=sampler,
            assembler=self._make_assembler(group),
            clock=Clock(group.arrived),
            end_ids=end_ids,
            max_output=room if params.max_tokens is None else params.max_tokens,
            speculate=engine.speculation.choose(params, engine.config.speculate),
        )
        request.limit = len(prompt) + branch.max_output
        branch.on_device, branch.draws_in_turn = on_device(engine.runner, branch), draws_in_turn(params)
        group.branches.append(branch)

    def _make_assembler(self, group: Group) -> Assembler | PlainAssembler | None:
        params = group.params
        if self._tokenizer is not None:
            if not params.stop and not params.bad_words:
                return PlainAssembler(self._tokenizer, group.continued_ids)
            return Assembler(
                self._tokenizer,
                group.continued_ids,
                stops=params.stop,
                include_stop=params.include_stop_str,
                banned=params.bad_words,
            )
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                raise RequestError(f"{name} needs a tokenizer; this model was loaded without one", name)
        return None

    def _prepare_search(self, group: BeamGroup) -> None:
        params, leader = group.params, group.branches[0]
        assert params.beam is not None
        if params.bad_words:
            raise RequestError("bad_words go back in an answer, which a beam cannot; use a constraint", "bad_words")
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


def force(group: Group, output: Sequence[int]) -> list[tuple[Branch, Piece]]:
    """Begin every branch of a group with the same tokens; the text that this gives."""
    if isinstance(group, BeamGroup):
        raise RequestError("a beam search chooses its tokens from the first on; output cannot be given", "output")
    pieces = []
    for branch in group.branches:
        branch.request.tokens.extend(output)
        for token in output:
            branch.sampler.accept(token)
            piece, ending = branch.advance(Token(token))
            if ending is not None or piece.banned is not None:
                why = ending.reason if ending is not None else f"banned string {piece.banned!r}"
                raise RequestError(f"the given output ends the answer already ({why})", "output")
            pieces.append((branch, piece))
    return pieces

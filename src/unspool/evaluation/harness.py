"""EleutherAI's lm-eval with a model in this process: `UnspoolLM`, which lm-eval calls `unspool`.

lm-eval tokenizes nothing: contexts and continuations become token ids here, as its own adapters make them (spaces at
the end of a context belong to the continuation; an empty context is the start token, or the end token where there is
none). All requests of a task run as few large batches. With `keep` every answer is written to a file at once, and the
same command goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from unspool.errors import RequestError
from unspool.evaluation.grid import IN_FLIGHT, PLAIN
from unspool.events import Token
from unspool.llm import LLM
from unspool.params import SamplingParams
from unspool.params.registry import BY_NAME
from unspool.reporting import Journal, progress

log = logging.getLogger("unspool.evaluation")
PASS_TOKENS = 8192  # of texts that are scored together
MOST_TOKENS = 256  # of an answer, where a task does not say: lm-eval's own default
# lm-eval's names for sampling parameters; others are ours or refused.
RENAMED = {"max_gen_toks": "max_tokens", "max_new_tokens": "max_tokens", "until": "stop"}

Pair = tuple[tuple[str, str], list[int], list[int]]  # texts, ids of the context, ids of the continuation


class UnspoolLM(TemplateLM):
    """`model` is what `unspool run -m` takes; `tokenizer` a tokenizer.json whose ids are used instead of the model's
    own, so that engines with different conversions of one tokenizer are given the same ids; other options are `LLM`'s.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        pretrained: str | None = None,
        device: str | None = None,
        tokenizer: str | None = None,
        keep: str | Path | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        llm: LLM | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if batch_size not in (None, 1, "1", "auto") or max_batch_size is not None:
            log.warning("batch_size does nothing: the engine makes its own batches")
        if device is not None:  # lm-eval says cuda:0 where nobody chose, and expects the CPU where there is no GPU
            options["device"] = "auto" if device.startswith("cuda") else device
        self.llm = llm or LLM(pretrained or model, **options)
        self._encode = self.llm.encode if tokenizer is None else _encoder(Path(tokenizer))
        self._is_chat = False
        receipt = self.llm.receipt(0)
        self._journal = Journal(
            None if keep is None else Path(keep), {"model": receipt.model, "kernels": receipt.kernels}
        )
        self._known = {item["key"]: item["value"] for item in self._journal.items}

    # Tokens ---------------------------------------------------------------------------------------------------------
    @property
    def eot_token_id(self) -> int:
        ends = self.llm.checkpoint.eos_ids or self.llm.tokenizer.eos_ids
        return min(ends)

    @property
    def prefix_token_id(self) -> int:
        bos = self.llm.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """One less than the context: the engine keeps a place for an answer."""
        return self.llm.engine.context_length - 1

    @property
    def tokenizer_name(self) -> str:
        return self.llm.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if self._is_chat:  # a rendered conversation has its control tokens in it
            return self.llm.tokenizer.encode(string, add_special=add_special_tokens is not False, parse_special=True)
        if add_special_tokens is False:
            return self.llm.tokenizer.encode(string, add_special=False)
        return list(self._encode(string))

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        if self.llm.template is None:
            raise RequestError("the model has no chat template; leave out --chat")
        self._is_chat = True
        return self.llm.template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return "" if self.llm.template is None else str(self.llm.template.source)

    # Likelihoods ----------------------------------------------------------------------------------------------------
    def _loglikelihood_tokens(self, requests: Sequence[Pair], **kwargs: Any) -> list[tuple[float, bool]]:
        pairs = [(self._fitted(context, continuation), continuation) for _, context, continuation in requests]
        keys = [_key("loglikelihood", context, continuation) for context, continuation in pairs]
        left = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in self._known}
        with progress("texts", len(set(keys))) as shown:
            for some in _batches(list(left.items())):
                shown(len(set(keys)) - len(left.keys() - self._known.keys()))
                scored = self.llm.score_many([context + continuation for _, (context, continuation) in some])
                for (key, (context, _)), tokens in zip(some, scored, strict=True):
                    self._add(key, _likelihood(tokens[len(context) :]))
            shown(len(set(keys)))
        return [(float(self._known[key][0]), bool(self._known[key][1])) for key in keys]

    def _fitted(self, context: list[int], continuation: list[int]) -> list[int]:
        """The end of the context that fits before the continuation."""
        return self._shortened(context, self.max_length - len(continuation))

    def _shortened(self, ids: list[int], room: int) -> list[int]:
        if room < 1:
            raise RequestError(f"the model holds {self.max_length:,} tokens: there is no room for a prompt", "prompt")
        if len(ids) > room:
            log.warning("a prompt of %d tokens was cut to its last %d: the model holds no more", len(ids), room)
        return ids[-room:]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Each text in windows of the whole context; each token is predicted once."""
        found = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1, context_len=1,
            )  # fmt: skip
            found.append([make_disjoint_window(window) for window in windows])
        pairs = [(("", ""), context, continuation) for windows in found for context, continuation in windows]
        values = iter(self._loglikelihood_tokens(pairs))
        return [sum(next(values)[0] for _ in windows) for windows in found]

    # Answers --------------------------------------------------------------------------------------------------------
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = [request.args for request in requests]
        jobs = _seeded([(self.tok_encode(text), sampling(options)) for text, options in texts])
        keys = [_key("generate_until", *job) for job in jobs]
        left = {key: job for key, job in zip(keys, jobs, strict=True) if key not in self._known}
        done = len(set(keys)) - len(left)
        with progress("answers", len(set(keys))) as shown:
            for key, text in self._answers(list(left.items())):
                self._add(key, text)
                done += 1
                shown(done)
        return [str(self._known[key]) for key in keys]

    def _answers(self, jobs: Sequence[tuple[str, tuple[list[int], dict[str, Any]]]]) -> Iterator[tuple[str, str]]:
        waiting, flying = deque(jobs), deque[tuple[str, Any]]()
        try:
            while waiting or flying:
                while waiting and len(flying) < IN_FLIGHT:
                    key, (ids, params) = waiting.popleft()
                    ids = self._shortened(ids, self.max_length - params["max_tokens"])
                    flying.append((key, self.llm.stream(ids, SamplingParams(**params))))
                key, stream = flying.popleft()
                yield key, stream.result().text
        finally:
            for _, stream in flying:
                stream.close()

    def _add(self, key: str, value: Any) -> None:
        self._known[key] = value
        self._journal.add({"key": key, "value": value})

    def note_interrupted(self) -> None:
        self._journal.note_interrupted()


def _likelihood(tokens: Sequence[Token | None]) -> list[Any]:
    """The summed logprob, and whether each of the tokens is the likeliest."""
    known = [token for token in tokens if token is not None]
    return [math.fsum(token.logprob or 0.0 for token in known), all(token.rank == 1 for token in known)]


def sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams' fields from lm-eval's generation options; one that nobody knows is refused."""
    given = {RENAMED.get(name, name): value for name, value in options.items() if name != "do_sample"}
    for name in given:
        if name not in BY_NAME:
            raise RequestError(f"{name} in a task's generation_kwargs is no sampling parameter", name)
    if not options.get("do_sample", False) and not given.get("temperature"):
        given["temperature"] = 0.0
    stop = given.get("stop") or []
    given["stop"] = [stop] if isinstance(stop, str) else [one for one in stop if one]
    return PLAIN | {"seed": 0, "max_tokens": MOST_TOKENS} | given


def _seeded(jobs: Sequence[tuple[list[int], dict[str, Any]]]) -> list[tuple[list[int], dict[str, Any]]]:
    """Where a task samples an item several times, each time has a seed of its own; greedily they are one request."""
    seen: Counter[str] = Counter()
    found = []
    for ids, params in jobs:
        key = _key("", ids, params)
        found.append((ids, params | {"seed": params["seed"] + seen[key]} if params["temperature"] else params))
        seen[key] += 1
    return found


def _key(kind: str, *parts: Any) -> str:
    return hashlib.sha256(json.dumps([kind, *parts], sort_keys=True).encode()).hexdigest()[:32]


def _batches(items: Sequence[Any]) -> Iterator[list[Any]]:
    """Runs of items whose texts have some 8,000 tokens together."""
    some: list[Any] = []
    size = 0
    for item in items:
        length = sum(map(len, item[1]))
        if some and size + length > PASS_TOKENS:
            yield some
            some, size = [], 0
        some.append(item)
        size += length
    if some:
        yield some


def _encoder(path: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise RequestError(f"{file} is no tokenizer: {error}", "tokenizer") from None
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)

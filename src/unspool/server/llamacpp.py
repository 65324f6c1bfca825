"""Paths of llama.cpp's server that no other API has: /completion, /apply-template, /props and /slots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from unspool.chat.parts import Content
from unspool.errors import RequestError
from unspool.events import Token
from unspool.params import ResolvedParams, SamplingParams
from unspool.params.checks import MAX_BIAS
from unspool.params.resolve import jsonable
from unspool.results import Choice, Delta
from unspool.server import engines, schema
from unspool.server import fields as f
from unspool.server.chat_completions import conversation, toolbox_of
from unspool.server.dialect import Body, Writer, how_of, sampling_params, timings, token_entry, truncated
from unspool.server.faults import Fault, HTTPFault
from unspool.server.job import Job
from unspool.server.kinds import any_of, array, flag, integer, mapping, number, record, refused, string
from unspool.server.pages import json_response
from unspool.server.service import Service
from unspool.server.sse import frame
from unspool.version import VERSION

NO_SLOT = -1  # requests have no slots here: any of them may run in any step
# llama.cpp's names in `generation_settings` of parameters that have another one here.
SETTINGS: Mapping[str, str] = {
    "n_predict": "max_tokens",
    "max_tokens": "max_tokens",
    "typ_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_window",
    "dry_penalty_last_n": "dry_window",
} | {
    name: name
    for name in (
        "seed", "temperature", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
        "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length",
        "dry_sequence_breakers", "ignore_eos", "stop",
    )
}  # fmt: skip

# What the paths take ------------------------------------------------------------------------------------------------
_MIXED = any_of(string(), integer(0))
_TEXT = record(
    {"prompt_string": string(), "multimodal_data": array({}, most=0, description=f.NO_IMAGES)},
    required=("prompt_string",),
)
_BIAS = any_of(number(-MAX_BIAS, MAX_BIAS), flag())
COMPLETION = record(
    {
        "prompt": any_of(
            string(),
            array(any_of(string(), integer(0), array(_MIXED, least=1), _TEXT), least=1),
            _TEXT,
            description="A text (also as an object with prompt_string), a list of token ids and texts, or a list of "
            "such prompts.",
        ),
        **f.MODEL,
        "stream": schema.STREAM["stream"],
        **{name: field for name, field in f.SAMPLING.items() if name not in ("best_of", "beam", "trace")},
        "max_tokens": integer(-1, description="Another name of n_predict."),
        **{
            name: field
            for name, field in engines.FOR_COMPLETIONS.items()
            if name not in ("use_beam_search", "length_penalty", "return_token_ids", "return_tokens_as_token_ids")
        },
        "seed": {**f.SAMPLING["seed"], "description": "-1, or none: one is drawn for each answer, and reported."},
        "logit_bias": any_of(
            mapping(_BIAS, maxProperties=f.MAX_BIASES),
            array(array(any_of(string(), number(), flag()), least=2, most=2), most=f.MAX_BIASES),
            description="Token ids or texts and what is added to their logits, as an object or as pairs; false bans.",
        ),
        "post_sampling_probs": flag(description="With n_probs: probabilities after all stages, as `prob`."),
        "response_fields": array(string(), most=256, description="Only these; a/b is field b of a."),
        "image_data": refused(f.NO_IMAGES),
    },
    required=("prompt",),
)
APPLY_TEMPLATE = record(
    {
        name: schema.TOKENIZE["properties"][name]
        for name in (
            "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
            "enable_thinking",
        )
    },
    required=("messages",),
)  # fmt: skip


# POST /completion ---------------------------------------------------------------------------------------------------
class NativeWriter(Writer):
    """An answer in llama.cpp's format. For several answers the body is a list."""

    def write(self, delta: Delta) -> Iterable[bytes]:
        if delta.tokens or delta.parts:
            chunk = self._part("".join(part.text for part in delta.parts if isinstance(part, Content)), delta)
            yield frame(chunk)
        if delta.end is not None:
            yield frame(self._whole(delta.choice, content="", tokens=()))

    def body(self) -> Any:
        answers = [self._whole(choice, choice.message.content, choice.tokens) for choice in self.run.choices]
        return answers[0] if len(answers) == 1 else answers

    @classmethod
    def refuse(cls, fault: Fault) -> Iterable[bytes]:
        yield frame(fault.openai())

    def _part(self, content: str, delta: Delta) -> Body:
        choice = delta.choice
        chunk: Body = {
            "index": choice.index,
            "content": content,
            "tokens": [token.id for token in delta.tokens],
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": len(choice.tokens),
            "tokens_evaluated": len(self._prompt(choice)),
        }
        if self.asked.get("timings_per_token"):
            chunk["timings"] = timings(self.run, choice)
        return chunk | self._probabilities(delta.tokens)

    def _whole(self, choice: Choice, content: str, tokens: Sequence[Token]) -> Body:
        end, params = choice.end, self.run.params[self.prompt_of(choice)]
        assert end is not None
        stop_type, word = _stop(end.reason, end.stop)
        prompt = self._prompt(choice)
        whole: Body = {
            "index": choice.index,
            "content": content,
            "tokens": [token.id for token in tokens] if self.asked.get("return_token_ids") else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self.service.name,
            "tokens_predicted": choice.num_tokens,
            "tokens_evaluated": len(prompt),
            "generation_settings": settings(params, end.seed, is_stream=self.run.job.stream),
            "prompt": self.tokenizer.decode(prompt),
            "has_new_line": "\n" in choice.message.content,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": len(prompt) + choice.num_tokens,
            "timings": timings(self.run, choice),
            **(self._probabilities(tokens) if tokens else {}),
            "unspool": self.service.report(self.run),
        }
        return _only(whole, self.asked["response_fields"]) if self.asked.get("response_fields") else whole

    def _prompt(self, choice: Choice) -> list[int]:
        return self.run.job.prompts[self.prompt_of(choice)][0]

    def _probabilities(self, tokens: Sequence[Token]) -> Body:
        if not self.asked.get("logprobs") or not tokens:
            return {}
        entries = [token_entry(token, self.tokenizer) for token in tokens]
        if self.asked.get("post_sampling_probs"):
            entries = [
                {**_as_prob(entry), "top_probs": [_as_prob(one) for one in entry["top_logprobs"] if _chance(one) > 0]}
                for entry in entries
            ]
        return {"completion_probabilities": entries}


def _stop(reason: str, stop: str | int | None) -> tuple[str, str]:
    """llama.cpp's stop type of an answer, and the stop string."""
    if reason == "stop" and isinstance(stop, str):
        return "word", stop
    return ("eos" if reason in ("eos", "stop", "constraint") else "limit"), ""


def _chance(entry: Body) -> float:
    return math.exp(entry["logprob"])


def _as_prob(entry: Body) -> Body:
    kept = {name: entry[name] for name in ("id", "token", "bytes")}
    return {**kept, "prob": _chance(entry)}


def _only(whole: Body, names: Iterable[str]) -> Body:
    """The fields with these names; absent ones are skipped."""
    found: Body = {}
    for name in names:
        value: Any = whole
        for part in name.split("/"):
            value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            found[name] = value
    return found


_MISSING = object()


def settings(params: ResolvedParams, seed: int | None, *, is_stream: bool) -> Body:
    """The parameters in force under llama.cpp's names; -1 means no limit, or a seed that is drawn."""
    values = {theirs: jsonable(getattr(params, ours)) for theirs, ours in SETTINGS.items()}
    for name in ("n_predict", "max_tokens"):
        values[name] = -1 if values[name] is None else values[name]
    biases = params.logit_bias.items()
    bias = [{"token": id, "bias": amount if math.isfinite(amount) else None} for id, amount in biases]
    more = {"n_probs": params.logprobs or 0, "samplers": jsonable(params.order), "stream": is_stream}
    return {**values, "seed": NO_SEED if seed is None else seed, "logit_bias": bias, **more}


NO_SEED = -1


def prepare(service: Service, body: Body) -> Job:
    stream, length = bool(body.get("stream")), body.get("max_tokens", -1)
    if body.get("seed") == NO_SEED:
        del body["seed"]
    if body.get("post_sampling_probs"):
        body["logprobs_stage"] = "final"
    if "logit_bias" in body:
        body["logit_bias"] = _biases(service, body["logit_bias"])
    params = sampling_params(
        body, max_tokens=None if length < 0 else length, logprobs=body.get("logprobs"), prompt_logprobs=None
    )
    special = body.get("add_special_tokens", True)
    prompts = [truncated(service, _encode(service, parts, special), body) for parts in _prompts(body["prompt"])]
    return Job([(ids, params) for ids in prompts], stream, length_field="n_predict")


def _prompts(prompt: Any) -> list[list[str | int]]:
    """Each prompt as its parts, texts and token ids."""
    if isinstance(prompt, dict):
        prompt = prompt["prompt_string"]
    if isinstance(prompt, str):
        return [[prompt]]
    if any(isinstance(part, int) for part in prompt):
        if any(isinstance(part, list | dict) for part in prompt):
            raise RequestError("prompt mixes token ids with prompts; give one prompt, or a list of prompts", "prompt")
        return [prompt]
    if len(prompt) > f.MAX_PROMPTS:
        raise RequestError(f"prompt has {len(prompt):,} prompts; at most {f.MAX_PROMPTS:,} are taken", "prompt")
    texts = [part["prompt_string"] if isinstance(part, dict) else part for part in prompt]
    return [[part] if isinstance(part, str) else part for part in texts]


def _encode(service: Service, parts: Sequence[str | int], special: bool) -> list[int]:
    service.check_length([part for part in parts if isinstance(part, str)], "prompt")
    ids: list[int] = []
    for number_, part in enumerate(parts):
        is_first = number_ == 0
        ids += [part] if isinstance(part, int) else service.encode(part, "prompt", add_special=special and is_first)
    return ids


def _biases(service: Service, given: Any) -> dict[str, float]:
    """Biases by token id, with text keys. The bias of a text applies to each of its tokens."""
    pairs = list(given.items()) if isinstance(given, dict) else given
    found: dict[str, float] = {}
    for index, (key, amount) in enumerate(pairs):
        place = f"logit_bias[{index}]"
        if isinstance(amount, str) or (isinstance(amount, bool) and amount) or isinstance(key, bool | float):
            raise RequestError(f"{place} is not a token id or a text with a number or false", place)
        if amount is not False and not -MAX_BIAS <= amount <= MAX_BIAS:
            raise RequestError(f"{place} is {amount}; allowed: from {-MAX_BIAS} to {MAX_BIAS}, or false", place)
        is_id = isinstance(key, int) or key.isdecimal()
        ids = [int(key)] if is_id else service.encode(key, place, add_special=False)
        found |= {str(id): -math.inf if amount is False else amount for id in ids}
    if len(found) > f.MAX_BIASES:
        raise RequestError(f"logit_bias has {len(found):,} tokens; at most {f.MAX_BIASES:,} are taken", "logit_bias")
    return found


# POST /apply-template -----------------------------------------------------------------------------------------------
def apply_template(service: Service, body: Body) -> Body:
    """A conversation as the text that the model reads."""
    prompt = service.render(
        conversation(body["messages"]), toolbox_of(body), body.get("chat_template_kwargs", {}), how=how_of(body)
    )
    return {"prompt": service.llm.tokenizer.decode(prompt.ids)}


# GET /props, /slots -------------------------------------------------------------------------------------------------
async def props(service: Service, request: Request) -> Response:
    llm, checkpoint = service.llm, service.llm.checkpoint
    params = SamplingParams(seed=0).resolve(checkpoint.generation, vocab_size=checkpoint.config.vocab_size)
    named = llm.tokenizer.named_tokens
    is_loaded: Body = {"id": 0, "id_task": NO_SLOT, "n_ctx": llm.engine.context_length, "is_processing": False}
    return json_response(
        {
            "default_generation_settings": {**is_loaded, "params": settings(params, None, is_stream=True)},
            "total_slots": llm.engine.config.max_running,
            "model_alias": service.name,
            "model_path": checkpoint.path.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": "" if llm.template is None else llm.template.source,
            "bos_token": named.get("bos_token") or "",
            "eos_token": named.get("eos_token") or "",
            "build_info": f"unspool-{VERSION}",
            "is_sleeping": False,
        }
    )


async def slots(service: Service, request: Request) -> Response:
    """One slot per possible concurrent request, without any text; the first slots are the running requests."""
    engine = service.llm.engine
    count, running = engine.config.max_running, int(engine.stats["running"])
    if running >= count and request.query_params.get("fail_on_no_slot"):
        raise HTTPFault(503, f"all {count} slots are in use", code="no_slot", headers={"retry-after": "1"})
    shared = {"id_task": NO_SLOT, "n_ctx": engine.context_length, "speculative": engine.config.speculate is not None}
    return json_response([{"id": id, **shared, "is_processing": id < running} for id in range(count)])

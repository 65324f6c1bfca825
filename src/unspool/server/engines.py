"""Other engines' fields: the field of unspool that each becomes, or why it is refused.

A request is checked with these fields in its table like any other. Then `translate` replaces them by unspool's fields,
so that later code knows only one name for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unspool.errors import RequestError
from unspool.server import fields as f
from unspool.server.kinds import Schema, any_of, array, flag, inert, integer, mapping, number, only, record, refused

from unspool.server.kinds import string, word  # isort: skip

Body = dict[str, Any]
VLLM, LLAMA, SGLANG = "vLLM", "llama.cpp", "SGLang"
NO_ADAPTERS = "there are no adapters here"
ONE_PROCESS = "a request is computed where it arrives"
TEXT_ONLY = "the models served here read text"


@dataclass(frozen=True)
class Alias:
    """Another engine's field, and unspool's fields with the same meaning."""

    engine: str
    schema: Schema
    becomes: Callable[[Any, Body], Body]

    @property
    def field(self) -> Schema:
        return {**self.schema, "description": f"{self.engine}'s: {self.schema.get('description', '')}".rstrip(": ")}


def _named(field: str) -> Callable[[Any, Body], Body]:
    return lambda value, body: {field: value}


def _constraint(kind: str) -> Callable[[Any, Body], Body]:
    return lambda value, body: {"constraint": {"kind": kind, "value": value}}


def _renamed(engine: str, field: str, schema: Schema, about: str = "") -> Alias:
    return Alias(engine, {**schema, "description": about or f"our `{field}`."}, _named(field))


def _flag(engine: str, about: str, *, value: Any = None) -> Schema:
    """A field with one harmless value: other values request something unsupported."""
    return {**inert(only(value)), "description": f"{engine}'s: {about}"}


# Constraints --------------------------------------------------------------------------------------------------------
SCHEMA_OR_TEXT = any_of(mapping(), string(), description="a JSON schema, as an object or as text.")
WAYS = ("json", "regex", "choice", "grammar", "json_object")


def _structured(value: Body, body: Body) -> Body:
    given = [name for name in WAYS if value.get(name) not in (None, False)]
    if len(given) != 1:
        raise RequestError(f"structured_outputs needs one of {', '.join(WAYS)}", "structured_outputs")
    kind = {"json": "json_schema"}.get(given[0], given[0])
    content = None if kind == "json_object" else value[given[0]]
    if value.get("disable_any_whitespace"):
        if kind == "json_schema":
            content = {**_as_object(content, "structured_outputs.json"), "x-unspool": {"whitespace": "compact"}}
        elif kind == "json_object":
            content = {"whitespace": "compact"}
    return {"constraint": {"kind": kind, **({} if content is None else {"value": content})}}


def _as_object(schema: Any, param: str) -> Body:
    from unspool import strict_json

    try:
        found = strict_json.loads(schema.encode()) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param} is not JSON: {error}", param) from None
    if not isinstance(found, dict):
        raise RequestError(f"{param} must be a JSON schema", param)
    return dict(found)


# Penalties, order, beams --------------------------------------------------------------------------------------------
def _repeat_penalty(value: float, body: Body) -> Body:
    """llama.cpp counts the prompt too, and its window is 64 tokens unless repeat_last_n is set."""
    more = {} if "penalty_window" in body else {"penalty_window": 64}
    return {"repetition_penalty": value, **more, **({} if "penalty_scope" in body else {"penalty_scope": "all"})}


def _repeat_last_n(value: int, body: Body) -> Body:
    if value == 0:  # no penalties
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty", "repeat_penalty"):
            body.pop(name, None)
        return {}
    return {"penalty_window": value}


def _dry_last_n(value: int, body: Body) -> Body:
    if value == 0:
        body.pop("dry_multiplier", None)
        return {}
    return {"dry_window": value}


SAMPLERS: Mapping[str, tuple[str, ...]] = {
    "penalties": ("repetition", "frequency", "presence"),
    "dry": ("dry",),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typ_p": ("typical_p",),
    "typical_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc",),
    "temperature": ("temperature",),
}


def _samplers(value: list[str], body: Body) -> Body:
    return {"order": ["bias", "allowed", "constraint", *(stage for name in value for stage in SAMPLERS[name])]}


def _beam(value: bool, body: Body) -> Body:
    penalty = {"length_penalty": body.pop("length_penalty")} if "length_penalty" in body else {}
    return {"beam": {"width": body.get("n", 1), **penalty}} if value else {}


def _repetition_detection(value: Body, body: Body) -> Body:
    return {"repetition_detector": {"period": value["max_pattern_size"], "repeats": value["min_count"]}}


def _n_probs(value: int, body: Body) -> Body:
    if value == 0:
        return {}
    return {"logprobs": True, "top_logprobs": value} if "messages" in body else {"logprobs": value}


def _n_predict(value: int, body: Body) -> Body:
    return {} if value < 0 else {"max_tokens": value}


def _documents(value: Any, body: Body) -> Body:
    body["chat_template_kwargs"] = {**body.get("chat_template_kwargs", {}), "documents": value}
    return {}


def _nothing(value: Any, body: Body) -> Body:
    return {}


COUNT = integer(-1)
ALIASES: dict[str, Alias] = {
    # vLLM. use_beam_search comes first: it consumes length_penalty, which has no meaning without it.
    "use_beam_search": Alias(
        VLLM, flag(description="our `beam` of width `n`, with `length_penalty`; lengths count the answer alone."), _beam
    ),
    "length_penalty": Alias(
        VLLM, number(-100, 100, description="see use_beam_search; else it does nothing."), _nothing
    ),
    "structured_outputs": Alias(
        VLLM,
        record(
            {
                "json": SCHEMA_OR_TEXT,
                "regex": string(),
                "choice": array(string(minLength=1), least=1),
                "grammar": string(),
                "json_object": flag(),
                "disable_any_whitespace": flag(),
                "disable_additional_properties": inert(flag()),
                "whitespace_pattern": refused("see docs/constraints.md for the whitespace that is allowed"),
                "structural_tag": refused("tools are held to their schemas by `strict` or `tool_choice`"),
            },
            description="our `constraint`.",
        ),
        _structured,
    ),
    "guided_json": Alias(VLLM, SCHEMA_OR_TEXT, _constraint("json_schema")),
    "guided_regex": Alias(VLLM, string(description="our `constraint` of kind regex."), _constraint("regex")),
    "guided_choice": Alias(
        VLLM, array(string(minLength=1), least=1, description="our `constraint` of kind choice."), _constraint("choice")
    ),
    "guided_grammar": Alias(
        VLLM, string(description="our `constraint` of kind grammar: GBNF or Lark."), _constraint("grammar")
    ),
    "include_stop_str_in_output": _renamed(VLLM, "include_stop_str", flag()),
    "thinking_token_budget": _renamed(VLLM, "thinking_budget", integer(0)),
    "repetition_detection": Alias(
        VLLM,
        record(
            {"max_pattern_size": integer(1, 4096), "min_pattern_size": only(1), "min_count": integer(2, 4096)},
            required=("max_pattern_size", "min_count"),
            description="our `repetition_detector`.",
        ),
        _repetition_detection,
    ),
    # llama.cpp
    "grammar": Alias(LLAMA, string(description="GBNF (or Lark): our `constraint`."), _constraint("grammar")),
    "json_schema": Alias(f"{LLAMA} and {SGLANG}", SCHEMA_OR_TEXT, _constraint("json_schema")),
    "n_predict": Alias(LLAMA, integer(-1, description="our `max_tokens`; -1 is no limit."), _n_predict),
    "n_probs": Alias(LLAMA, integer(0, f.MAX_TOP, description="our `logprobs`."), _n_probs),
    "repeat_last_n": Alias(LLAMA, {**COUNT, "description": "our `penalty_window`; 0 is no penalty."}, _repeat_last_n),
    "repeat_penalty": Alias(
        LLAMA,
        number(1e-3, 100, description="our `repetition_penalty`, which counts the prompt too, the last 64 tokens."),
        _repeat_penalty,
    ),
    "dry_penalty_last_n": Alias(LLAMA, {**COUNT, "description": "our `dry_window`; 0 is no DRY."}, _dry_last_n),
    "samplers": Alias(
        LLAMA,
        array(
            word(*SAMPLERS), most=16, description="our `order`, behind bias and constraint; those not named are off."
        ),
        _samplers,
    ),
    "return_tokens": _renamed(LLAMA, "return_token_ids", flag()),
    "thinking_budget_tokens": Alias(
        LLAMA,
        integer(-1, description="our `thinking_budget`; -1 is none."),
        lambda value, body: {} if value < 0 else {"thinking_budget": value},
    ),
    # SGLang
    "regex": Alias(SGLANG, string(description="our `constraint` of kind regex."), _constraint("regex")),
    "ebnf": Alias(SGLANG, string(description="our `constraint` of kind grammar: GBNF."), _constraint("grammar")),
    "no_stop_trim": _renamed(SGLANG, "include_stop_str", flag()),
    "rid": _renamed(SGLANG, "request_id", string(minLength=1, maxLength=128)),
    "extra_key": _renamed(SGLANG, "cache_salt", string(maxLength=1024)),
    "separate_reasoning": _renamed(SGLANG, "include_reasoning", only(True), "thinking always comes apart."),
}

# Honoured, under their own names.
REPORTS: dict[str, Schema] = {
    "return_token_ids": flag(description="vLLM's: the ids of the prompt and of the answer, as `prompt_token_ids` and "
                             "`token_ids`."),
    "return_tokens_as_token_ids": flag(description="vLLM's: tokens in logprobs are written as `token_id:…`."),
    "request_id": string(minLength=1, maxLength=128, description="vLLM's: the end of the answer's id."),
    "truncate_prompt_tokens": integer(
        -1, description="vLLM's: keep so many of the prompt's tokens; -1: as many as the context has room for."
    ),
    "truncation_side": word("left", "right", description="vLLM's: where the prompt is cut (left)."),
    "timings_per_token": flag(description="llama.cpp's: `timings` in every chunk, not in the last one alone."),
}  # fmt: skip
CHAT_REPORTS: dict[str, Schema] = {
    "echo": flag(description="vLLM's: the answer begins with the message that it continues."),
    "include_reasoning": flag(description="vLLM's: false leaves the thinking out of the answer."),
    "prompt_logprobs": integer(0, f.MAX_TOP, description="vLLM's: the logprobs of the prompt's tokens."),
}
# Fields that change no answer here, and refused fields.
OTHERS: dict[str, Schema] = {
    "spaces_between_special_tokens": {**inert(flag()), "description": "vLLM's: no spaces are ever put."},
    "session_id": inert(string()),
    "guided_decoding_backend": {**inert(string()), "description": "vLLM's: one engine holds answers to constraints."},
    "cache_prompt": {**inert(flag()), "description": "llama.cpp's: an answer is the same without a cache."},
    "id_slot": {**inert(integer()), "description": "llama.cpp's: requests have no slots."},
    "n_keep": {**inert(integer()), "description": "llama.cpp's: nothing is ever cut from a context."},
    "n_discard": {**inert(integer()), "description": "llama.cpp's: nothing is ever cut from a context."},
    "n_cache_reuse": {
        **inert(integer()),
        "description": "llama.cpp's: an answer is the same with and without a cache.",
    },
    "min_keep": _flag(LLAMA, "0 alone: filters keep at least one token by themselves.", value=0),
    "mirostat": _flag(LLAMA, "0 alone: Mirostat is not supported; see `top_p`, `min_p` and `top_n_sigma`.", value=0),
    "mirostat_tau": inert(number()),
    "mirostat_eta": inert(number()),
    "dynatemp_range": _flag(LLAMA, "0 alone: the temperature does not change with the entropy.", value=0),
    "dynatemp_exponent": inert(number()),
    "n_indent": _flag(LLAMA, "0 alone.", value=0),
    "t_max_predict_ms": _flag(LLAMA, "0 alone: see `deadline_ms`.", value=0),
    "parse_tool_calls": _flag(LLAMA, "true alone: calls are always read.", value=True),
    "reasoning_format": {**inert(word("auto", "deepseek")), "description": "llama.cpp's: thinking always comes apart."},
    "stream_reasoning": _flag(SGLANG, "true alone.", value=True),
    "return_hidden_states": _flag(SGLANG, "false alone: there are logits and tokens, no hidden states.", value=False),
    "return_progress": _flag(LLAMA, "false alone.", value=False),
    "custom_labels": inert(mapping()),
    "lora": {**inert(array({}, most=0)), "description": f"llama.cpp's: an empty list alone: {NO_ADAPTERS}."},
    "lora_path": refused(NO_ADAPTERS),
    "stop_regex": refused("stops are strings or token ids; see `constraint`"),
    "custom_logit_processor": refused("no code is taken from requests; see `logit_bias` and `order`"),
    "custom_params": refused("no code is taken from requests"),
    "logits_processors": refused("no code is taken from requests; see `logit_bias` and `order`"),
    "logprob_token_ids": refused("see `top_logprobs`, and POST /v1/score"),
    "chat_template": refused("the model's own template is used; `unspool serve --chat-template FILE` sets another"),
    "whitespace_pattern": refused("see docs/constraints.md for the whitespace that is allowed"),
    "guided_whitespace_pattern": refused("see docs/constraints.md for the whitespace that is allowed"),
    "structural_tag": refused("tools are held to their schemas by `strict` or `tool_choice`"),
    "prompt_embeds": refused("prompts are texts or token ids"),
    "media_io_kwargs": refused(TEXT_ONLY),
    "mm_processor_kwargs": refused(TEXT_ONLY),
    "images_config": refused(TEXT_ONLY),
    "kv_transfer_params": refused(ONE_PROCESS),
    "ec_transfer_params": refused(ONE_PROCESS),
    "bootstrap_host": refused(ONE_PROCESS),
    "data_parallel_rank": refused(ONE_PROCESS),
    "vllm_xargs": refused("there are no extensions with arguments of their own"),
    "return_token_offsets": refused("completions' logprobs have `text_offset`"),
    "return_routed_experts": refused("a trace tells what sampling did, not which experts ran"),
    "stream_interval": refused("every event of the engine goes out at once"),
    "tfs_z": refused("replaced by `min_p` and `typical_p`"),
    "penalty_prompt": refused("see `penalty_scope`"),
    "session_params": refused("nothing is stored"),
    "input_ids": refused("completions take `prompt` as token ids"),
    "post_sampling_probs": refused('`logprobs_stage: "final"` tells logprobs after all stages'),
}
SHARED: dict[str, Schema] = {**{name: one.field for name, one in ALIASES.items()}, **REPORTS, **OTHERS}
FOR_CHAT: dict[str, Schema] = {
    **SHARED,
    **CHAT_REPORTS,
    "add_special_tokens": _flag(VLLM, "false alone: the template says what stands in front.", value=False),
    "documents": {**array(mapping()), "description": "vLLM's: the template's variable `documents`."},
}
FOR_COMPLETIONS: dict[str, Schema] = {
    **SHARED,
    "add_special_tokens": flag(description="vLLM's: put BOS in front of texts where the model wants it (true)."),
}


def translate(body: Body) -> dict[str, str]:
    """Replace other engines' fields by unspool's. Returns the original name of each; raises a RequestError if two
    fields set the same thing."""
    sent: dict[str, str] = {}
    if "documents" in body:
        _documents(body.pop("documents"), body)
    for name, alias in ALIASES.items():
        if name not in body:
            continue
        value = body.pop(name)
        for field, ours in alias.becomes(value, body).items():
            if field in body and body[field] != ours:
                other = sent.get(field, field)
                raise RequestError(f"{name} and {other} say the same thing in two ways; give one of them", name)
            body[field], sent[field] = ours, name
    return sent

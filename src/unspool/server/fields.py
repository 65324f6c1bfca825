"""Fields that several endpoints share: ours for sampling, OpenAI's for tools. Bounds agree with SamplingParams."""

from __future__ import annotations

from unspool.params import CONSTRAINT_KINDS
from unspool.sampling.order import PRESETS, STAGES
from unspool.server.kinds import (
    Schema,
    any_of,
    array,
    flag,
    inert,
    integer,
    mapping,
    number,
    only,
    record,
    refused_types,
    string,
    word,
)  # fmt: skip

MAX_STOPS = 64
MAX_STRING_LENGTH = 1024  # characters of a stop string or a bad word
MAX_STRING_CHARS = 16 * 1024  # of all of them together
MAX_BREAKERS = 64
MAX_MESSAGES = 4096
MAX_CHOICES = 64
MAX_PROMPTS = 256
MAX_TOP = 20
MAX_TOOLS = 128
MAX_BIASES = 4096

TOKEN_ID = integer(0)
STRING = string(minLength=1, maxLength=MAX_STRING_LENGTH)
STOPS = any_of(
    STRING,
    array(STRING, most=MAX_STOPS),
    description="Strings that end the answer; they are not part of it.",
)

# Sampling parameters that OpenAI does not have, by SamplingParams' names: extra fields of every generating endpoint.
EXTRA: dict[str, Schema] = {
    "top_k": integer(-1, 2**31 - 1, description="Draw from the k likeliest tokens; 0 or -1 is off."),
    "min_p": number(0, 1, description="Drop tokens below this share of the likeliest one's probability."),
    "typical_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "description": "Locally typical sampling."},
    "top_n_sigma": number(0, 1e6, description="Keep logits within n standard deviations of the best; 0 is off."),
    "xtc_probability": number(0, 1, description="How often the likeliest tokens are excluded (XTC)."),
    "xtc_threshold": {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "description": "XTC's threshold."},
    "repetition_penalty": number(1e-3, 100, description="Divides (or multiplies) logits of tokens seen; 1 is off."),
    "penalty_window": integer(-1, description="Tokens that penalties look back on; -1 is all."),
    "penalty_scope": word("all", "output", "mixed", description="Whether penalties count the prompt."),
    "dry_multiplier": number(0, 100, description="Strength of the DRY penalty; 0 is off."),
    "dry_base": number(1, 100, description="DRY's base."),
    "dry_allowed_length": integer(1, description="Repeats up to this length go unpunished by DRY."),
    "dry_sequence_breakers": array(
        string(minLength=1, maxLength=64), most=MAX_BREAKERS, description="Where DRY's sequences end."
    ),
    "dry_window": integer(-1, description="Tokens that DRY looks back on; -1 is all."),
    "no_repeat_ngram": integer(0, description="No n-gram of this length comes twice; 0 is off."),
    "allowed_token_ids": array(TOKEN_ID, least=1, description="No other tokens can be chosen."),
    "min_tokens": integer(0, description="No end token before this many tokens."),
    "stop_token_ids": array(TOKEN_ID, description="Tokens that end the answer."),
    "include_stop_str": flag(description="Keep the stop string that matched in the answer."),
    "ignore_eos": flag(description="End tokens do not end the answer."),
    "bad_words": any_of(
        STRING,
        array(STRING, most=1024),
        description="Strings that never appear; the engine goes back where one would.",
    ),
    "deadline_ms": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 1e12,
        "description": "End the answer this long after the request arrived, with finish reason `deadline`.",
    },
    "repetition_detector": record(
        {"period": integer(1, 4096), "repeats": integer(2, 4096)},
        description="End the answer, reason `repetition`, when it loops.",
    ),
    "constraint": record(
        {"kind": word(*CONSTRAINT_KINDS), "value": {"description": "A schema, expression, list or grammar, by kind."}},
        required=("kind",),
        description="What the answer must look like.",
    ),
    "beam": record(
        {
            "width": integer(1, 256),
            "length_penalty": number(-100, 100),
            "early_stopping": any_of(flag(), word("never")),
        },
        required=("width",),
        description="Search with this many beams instead of drawing.",
    ),
    "logprobs_stage": word("raw", "final", description="Logprobs of the model, or after all sampling stages."),
    "order": any_of(
        word(*PRESETS),
        array(word(*STAGES), most=len(STAGES)),
        description="The order of sampling stages: a preset's name, or a list.",
    ),
    "priority": integer(-(2**31), 2**31 - 1, description="Lower goes first."),
    "cache_salt": string(maxLength=1024, description="Cached prompts are shared only among requests of one salt."),
    "speculate": string(maxLength=256, description="Which of the engine's drafters guesses ahead, or `off`."),
    "trace": flag(description="Add to each token what every sampling stage did to it."),
}

# OpenAI's sampling fields, where an endpoint has them under these names.
TEMPERATURE = {"temperature": number(0, 1e6, description="0 takes the best token; else 1e-6 at least.")}
TOP_P: dict[str, Schema] = {"top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}}
PENALTIES = {"frequency_penalty": number(-2, 2), "presence_penalty": number(-2, 2)}
SEED = {
    "seed": integer(
        -(2**63),
        2**64 - 1,
        description="The same seed, the same answer; without one it is drawn and reported. One below 0 or from 2^53 up "
        "is taken modulo 2^53.",
    )
}
COUNT = {
    "n": integer(1, MAX_CHOICES, description="How many answers."),
    "best_of": integer(1, MAX_CHOICES, description="Draw this many, give the n of the best mean logprob."),
}
BIAS = {"logit_bias": mapping(number(-100, 100), maxProperties=MAX_BIASES, description="Token id to what is added.")}
SAMPLING: dict[str, Schema] = TEMPERATURE | TOP_P | PENALTIES | SEED | COUNT | BIAS | {"stop": STOPS} | EXTRA

MODEL: dict[str, Schema] = {
    "model": string(maxLength=512, description="The served model's name; without one, the model that is served.")
}
# Said about a caller, about bookkeeping or about a vendor's machines: none of it can change an answer here.
INERT: dict[str, Schema] = {
    "user": inert(string()),
    "safety_identifier": inert(string()),
    "metadata": inert(mapping(string())),
    "prompt_cache_key": inert(string()),
    "prompt_cache_retention": inert(string()),
    "prompt_cache_options": inert(mapping()),
    "service_tier": inert(word("auto", "default", "flex", "priority", "scale")),
    "store": inert(only(False, description="nothing is stored")),
}

NAME = string(minLength=1, maxLength=64)
JSON_SCHEMA = mapping(description="A JSON schema.")
FUNCTION = {
    "name": NAME,
    "description": string(),
    "parameters": JSON_SCHEMA,
    "strict": flag(description="Arguments are made to fit the schema."),
}
FORMAT = {
    "name": NAME,
    "description": inert(string()),
    "schema": JSON_SCHEMA,
    "strict": inert(flag(description="An answer always fits its schema here.")),
}
NO_IMAGES = "images are not supported: the models served here read text"
NO_AUDIO = "audio is not supported: the models served here read text"
NO_FILES = "files are not supported: put their text into the message"
CONTENT_PART = any_of(
    record({"type": only("text"), "text": string()}, required=("type", "text")),
    refused_types("image_url", "input_image", "image", why=NO_IMAGES),
    refused_types("input_audio", "audio", "audio_url", why=NO_AUDIO),
    refused_types("video_url", "video", why="videos are not supported: the models served here read text"),
    refused_types("file", "input_file", "document", why=NO_FILES),
    tag="type",
)

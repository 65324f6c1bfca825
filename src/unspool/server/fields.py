"""Fields that several endpoints share: sampling parameters, derived from their registry, and OpenAI's for tools."""

from __future__ import annotations

from unspool.params.checks import MAX_BIAS
from unspool.params.registry import BY_NAME, PARAMETERS, Parameter
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
MAX_TRACED = 256

TOKEN_ID = integer(0)
STRING = string(minLength=1, maxLength=MAX_STRING_LENGTH)

# Parameters with stricter limits than in the library, because clients are untrusted, or with values that JSON lacks.
LIMITED: dict[str, Schema] = {
    "stop": any_of(STRING, array(STRING, most=MAX_STOPS)),
    "bad_words": any_of(STRING, array(STRING, most=1024)),
    "dry_sequence_breakers": array(string(minLength=1, maxLength=64), most=MAX_BREAKERS),
    "cache_salt": string(maxLength=1024),
    "speculate": string(maxLength=256),
    "n": integer(1, MAX_CHOICES),
    "best_of": integer(1, MAX_CHOICES),
    "trace_top": integer(1, MAX_TRACED),
    "trace_tokens": array(TOKEN_ID, most=MAX_TRACED),
    "logit_bias": mapping(number(-MAX_BIAS, MAX_BIAS), maxProperties=MAX_BIASES),
    "seed": integer(
        -(2**63),
        2**64 - 1,
        description="The same seed, the same answer; without one it is drawn and reported. One below 0 or from 2^53 up "
        "is taken modulo 2^53.",
    ),
}
# The APIs have other names or types for these; schema.py gives them.
NAMED_BY_API = ("max_tokens", "logprobs", "prompt_logprobs")
# OpenAI has these under SamplingParams' names.
OPENAI = (
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "n",
    "best_of",
    "logit_bias",
    "stop",
)


def field(parameter: Parameter) -> Schema:
    """A sampling parameter as a field of a body."""
    return {"description": parameter.help, **(LIMITED.get(parameter.name) or parameter.kind.schema())}


# Sampling parameters that OpenAI does not have, by SamplingParams' names: extra fields of every generating endpoint.
EXTRA: dict[str, Schema] = {
    parameter.name: field(parameter)
    for parameter in PARAMETERS
    if parameter.name not in (*NAMED_BY_API, *OPENAI) and not parameter.is_local
}
SAMPLING: dict[str, Schema] = {name: field(BY_NAME[name]) for name in OPENAI} | EXTRA

MODEL: dict[str, Schema] = {
    "model": string(maxLength=512, description="The served model's name; without one, the model that is served.")
}
# Fields about the caller, bookkeeping or a vendor's machines: none of them can change an answer here.
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

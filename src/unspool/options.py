"""Keyword arguments of the library, with types that a type checker sees, and what becomes of them.

EngineOptions has the fields of EngineConfig, all optional; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypedDict

from unspool.config import Device, EngineConfig, Isa, KVDtype, Quantize
from unspool.drafter import Drafter
from unspool.errors import ModelError, RequestError
from unspool.params import SamplingParams
from unspool.params.declared import SamplingOptions
from unspool.suggest import nearest

Prompt = str | Sequence[int]
Batch = list[str] | list[Prompt] | tuple[Prompt, ...] | Sequence[Sequence[int]]  # a str is a Sequence[str] as well
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
ToolChoice = str | Mapping[str, Any]
JsonSchema = Mapping[str, Any] | bool


class EngineOptions(TypedDict, total=False):
    """The options of `LLM`: those of EngineConfig."""

    device: Device
    threads: int | None
    isa: Isa
    quantize: Quantize
    block_size: int
    kv_tokens: int | None
    kv_dtype: KVDtype
    state_bytes: int | None
    gpu_memory: float
    step_tokens: int
    chunk_tokens: int
    max_running: int
    max_waiting: int
    prefix_cache: bool
    speculate: str | Drafter | None
    chat_template: str | None
    rope_scaling: str | Mapping[str, Any] | None
    rope_theta: float | None
    max_model_len: int | None
    override_kv: Sequence[str] | Mapping[str, Any]


class GenerateOptions(SamplingOptions, total=False):
    """What `generate` takes by name besides `schema`: sampling parameters, and how it reports."""

    progress: bool | None


class ChatOptions(GenerateOptions, total=False):
    """What `chat` takes by name besides `schema`."""

    tools: Tools
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    template_options: Mapping[str, Any] | None


Params = SamplingParams | SamplingOptions | None  # how an answer is asked for
EachParams = Params | Sequence[Params]


def engine_config(options: EngineOptions) -> EngineConfig:
    """EngineConfig from keyword arguments; an unknown one is refused by name."""
    check_names(options, [field.name for field in fields(EngineConfig)], "option")
    return EngineConfig(**options)


def configured_options(model: str) -> dict[str, Any]:
    """The options that the user's configuration has for a model's name; what is wrong with them names the file."""
    from unspool.user_config import read_config

    config = read_config()
    found = config.find(model)
    if found is None or not found.options:
        return {}
    options = dict(found.options)
    template = options.get("chat_template")
    if isinstance(template, str) and "{" not in template:
        options["chat_template"] = str(config.path.parent / Path(template).expanduser())
    try:
        check_names(options, [field.name for field in fields(EngineConfig)], "option")
        EngineConfig(**options)
    except RequestError as error:
        raise ModelError(f"{config.path}: models.{found.name}.options: {error}") from error
    return options


def sampling_params(params: Params, options: SamplingOptions) -> SamplingParams:
    """What is asked for by `params`, changed by `options`; an unknown name is refused."""
    known = [field.name for field in fields(SamplingParams)]
    check_names(options, known, "sampling parameter")
    if params is None:
        return SamplingParams(**options)
    if isinstance(params, SamplingParams):
        return replace(params, **options) if options else params
    if isinstance(params, Mapping):
        check_names(params, known, "sampling parameter")
        merged: SamplingOptions = {**params, **options}
        return SamplingParams(**merged)
    raise RequestError(
        f"params is {params!r:.80}; allowed: SamplingParams, or a dictionary of its fields; single parameters may be "
        "given by name, as in temperature=0",
        "params",
    )


def check_names(given: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Refuse a name that does not exist, and suggest the nearest one that does."""
    for name in given:
        if name not in known:
            hint = nearest(str(name), known, f"known: {', '.join(sorted(known))}")
            raise RequestError(f"unknown {what} {name!r}{hint}", str(name))

"""A checkpoint with values that the caller has set in place of those in its files."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.config import NO_OVERRIDES, EngineConfig, ModelConfig, RopeScaling, overrides_of
from unspool.digest import sha256
from unspool.errors import ModelError, RequestError
from unspool.models import hf_keys
from unspool.models.gguf_keys import FACTORS
from unspool.models.limits import check_config
from unspool.models.registry import architecture_of
from unspool.overrides import Override
from unspool.weights.fields import Fields

if TYPE_CHECKING:
    from unspool.models.checkpoint import Checkpoint

MAX_TEMPLATE = 1 << 20


def overridden(checkpoint: Checkpoint, config: EngineConfig) -> Checkpoint:
    """The checkpoint with the overrides of an EngineConfig, each listed in `overrides`. A checkpoint that already has
    these overrides is returned unchanged."""
    asked = overrides_of(config)
    if asked in (checkpoint.overridden_by, NO_OVERRIDES):
        return checkpoint
    if checkpoint.overridden_by:
        raise RequestError(f"{checkpoint.name} was opened with other overrides already", "model")
    if config.override_kv:
        checkpoint = _reopened(checkpoint, config)
    if config.rope_theta is not None:
        checkpoint = _with_theta(checkpoint, config.rope_theta)
    if config.rope_scaling is not None:
        checkpoint = _with_scaling(checkpoint, str(config.rope_scaling))
    if config.max_model_len is not None:
        checkpoint = _with_length(checkpoint, config.max_model_len)
    if config.chat_template is not None:
        checkpoint = _with_template(checkpoint, config.chat_template)
    return replace(checkpoint, overridden_by=asked)


def _noted(checkpoint: Checkpoint, override: Override, **changes: Any) -> Checkpoint:
    return replace(checkpoint, overrides=(*checkpoint.overrides, override), **changes)


def _reopened(checkpoint: Checkpoint, config: EngineConfig) -> Checkpoint:
    from unspool.models.checkpoint import open_checkpoint

    if not checkpoint.path.is_file():
        raise RequestError(f"override_kv sets keys of GGUF files; {checkpoint.name} has none", "override_kv")
    return open_checkpoint(checkpoint.path, tuple(config.override_kv))


# Rotary positions ---------------------------------------------------------------------------------------------------
def _with_theta(checkpoint: Checkpoint, theta: float) -> Checkpoint:
    config = replace(checkpoint.config, rope_theta=theta)
    _check_effect("rope_theta", checkpoint.config, config)
    return _noted(checkpoint, Override("rope_theta", f"{theta:g}", f"{checkpoint.config.rope_theta:g}"), config=config)


def _with_scaling(checkpoint: Checkpoint, text: str) -> Checkpoint:
    before = checkpoint.config
    tied = [name for name in ("growth", "score_log") if getattr(before, name, 0)]
    if tied:
        raise ModelError(
            f"rope_scaling: {before.architecture} scales attention by its own RoPE scaling, which cannot be replaced"
        )
    trained = _trained_context(before)
    values = Fields(Path("rope_scaling"), json.loads(text))
    scaling = hf_keys.scaling(values, before.context_length, trained, before.rope_dim)
    original = (scaling.original_context if scaling is not None else 0) or trained
    context = original if scaling is None else int(original * scaling.factor)
    config = replace(before, rope_scaling=scaling, context_length=context)
    weights = {name: weight for name, weight in checkpoint.weights.items() if name != FACTORS}
    if len(weights) == len(checkpoint.weights):
        _check_effect("rope_scaling", before, config)
    override = Override("rope_scaling", _described(scaling), _described(before.rope_scaling))
    return _noted(checkpoint, override, config=check_config(Path("rope_scaling"), config), weights=weights)


def _trained_context(config: ModelConfig) -> int:
    """The context that a model was trained with, before any RoPE scaling."""
    scaling = config.rope_scaling
    if scaling is None:
        return config.context_length
    return scaling.original_context or max(1, int(config.context_length / scaling.factor))


def _described(scaling: RopeScaling | None) -> str:
    if scaling is None:
        return "none"
    usual = {field.name: field.default for field in fields(RopeScaling)}
    values = {field.name: getattr(scaling, field.name) for field in fields(RopeScaling)}
    more = [f"{name} {value:g}" for name, value in values.items()
            if isinstance(value, int | float) and name != "factor" and value != usual[name]]  # fmt: skip
    return ", ".join([f"{scaling.kind} {scaling.factor:g}", *more])


def _check_effect(option: str, before: ModelConfig, after: ModelConfig) -> None:
    """Refuse an option that would change no layer, instead of ignoring it."""
    if before != after and architecture_of(replace(after, context_length=before.context_length)) == architecture_of(
        before
    ):
        raise ModelError(f"{option}: no layer of {before.architecture} has rotary positions that it would change")


# Context and template -----------------------------------------------------------------------------------------------
def _with_length(checkpoint: Checkpoint, length: int) -> Checkpoint:
    own = checkpoint.config.context_length
    if length > own:
        raise RequestError(
            f"max_model_len is {length:,}; {checkpoint.name} holds {own:,} tokens (rope_scaling makes it hold more)",
            "max_model_len",
        )
    return _noted(checkpoint, Override("max_model_len", str(length), str(own), is_input=True))


def _with_template(checkpoint: Checkpoint, given: str) -> Checkpoint:
    source = given if "{" in given else _read_template(Path(given).expanduser())
    override = Override("chat_template", _digest(source), None if checkpoint.chat_template is None
                    else _digest(checkpoint.chat_template), is_input=True)  # fmt: skip
    return _noted(checkpoint, override, chat_template=source, tool_template=None)


def _read_template(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            source = file.read(MAX_TEMPLATE + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ModelError(f"chat_template: {path} cannot be read: {reason}") from error
    if len(source) > MAX_TEMPLATE:
        raise ModelError(f"chat_template: {path} has more than {MAX_TEMPLATE:,} characters")
    if "{{" not in source and "{%" not in source:
        raise ModelError(f"chat_template: {path} holds no template: it has neither {{{{ nor {{%")
    return source


def _digest(text: str) -> str:
    return f"sha256:{sha256(text.encode()).hexdigest()[:12]}"

"""The drafters that an engine's configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unspool.drafter import BaseDrafter
from unspool.engine.runner import make_runner
from unspool.errors import RequestError
from unspool.models.decoder import Decoder
from unspool.ops.storage import state_bytes

if TYPE_CHECKING:
    from unspool.engine.engine import Engine


def make_drafters(engine: Engine) -> dict[str, BaseDrafter]:
    """The drafters that an engine's configuration names; the first is the one that requests get."""
    how = engine.config.speculate
    if how is None:
        return {}
    from unspool.speculate.lookup import Lookup
    from unspool.speculate.own import OwnDrafter

    if not isinstance(how, str):
        return {OwnDrafter.name: OwnDrafter(how), "lookup": Lookup()}
    kind, _, detail = how.partition(":")
    if kind == "early-exit":
        return {"early-exit": _early_exit(engine, detail), "lookup": Lookup()}
    if kind == "model":
        return {"model": _draft_model(engine, detail), "lookup": Lookup()}
    return {"lookup": Lookup()}


def _early_exit(engine: Engine, detail: str) -> BaseDrafter:
    from unspool.speculate.model import ModelDrafter

    most = engine.checkpoint.config.num_layers
    num_layers = int(detail) if detail else max(1, most // 2)
    if not 1 <= num_layers <= most:
        raise RequestError(f"early-exit has {detail!r} layers; the model has {most}", "speculate")
    _check_stateless(engine.runner.model, "early-exit")
    cut = engine.runner.model.early(num_layers)
    return ModelDrafter("early-exit", make_runner(cut, engine.config, engine.runner.kv.num_blocks))


def _draft_model(engine: Engine, path: str) -> BaseDrafter:
    from unspool.models.checkpoint import open_checkpoint
    from unspool.models.registry import build
    from unspool.speculate.model import ModelDrafter, check_same_tokenizer
    from unspool.weights.store import resolve

    checkpoint = open_checkpoint(resolve(path))
    if engine.tokenizer is None:
        raise RequestError("a draft model needs the target's tokenizer, to check that they share it", "speculate")
    check_same_tokenizer(engine.tokenizer, checkpoint.tokenizer(), path)
    model = build(checkpoint.config, checkpoint.weights, engine.ops)
    _check_stateless(model, f"the draft model {path}")
    return ModelDrafter("model", make_runner(model, engine.config, engine.runner.kv.num_blocks))


def _check_stateless(model: Decoder, what: str) -> None:
    """A drafter goes back with every rejected draft, which it can only where layers keep keys and values alone."""
    if state_bytes(model.architecture.storage):
        raise RequestError(f"{what}: models with recurrent layers cannot draft; use lookup", "speculate")

"""The drafters that an engine's configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unspool.drafter import BaseDrafter
from unspool.engine.runner import make_runner
from unspool.errors import RequestError
from unspool.models.decoder import Decoder
from unspool.models.registry import draft_head_of
from unspool.ops.storage import state_bytes

if TYPE_CHECKING:
    from unspool.engine.engine import Engine
    from unspool.models.checkpoint import Checkpoint
    from unspool.ops import Ops


def make_drafters(engine: Engine) -> dict[str, BaseDrafter]:
    """The drafters that an engine's configuration names; the first is the one that requests get."""
    from unspool.speculate.lookup import Lookup
    from unspool.speculate.own import OwnDrafter

    how = engine.config.speculate
    if how is None:
        return {}
    if not isinstance(how, str):
        return {OwnDrafter.name: OwnDrafter(how), "lookup": Lookup()}
    kind, _, detail = how.partition(":")
    if kind == "early-exit":
        return {"early-exit": _early_exit(engine, detail), "lookup": Lookup()}
    if kind == "mtp":
        return {"mtp": _head(engine), "lookup": Lookup()}
    if kind == "model":
        return {"model": _draft_model(engine, detail), "lookup": Lookup()}
    return {"lookup": Lookup()}


def check_head(checkpoint: Checkpoint, ops: Ops) -> None:
    """Refuse mtp, whose drafter reads the model's hidden rows, where it cannot."""
    if ops.name not in ("cpu", "reference"):
        raise RequestError(
            f"mtp: heads that predict further ahead draft on the CPU and on the reference backend, not on {ops.name}",
            "speculate",
        )
    if draft_head_of(checkpoint.config) is None:
        raise RequestError(
            f"mtp: models of {checkpoint.config.architecture} have no head that predicts further ahead, or none that "
            "is supported; lookup needs none",
            "speculate",
        )
    if not checkpoint.draft_weights():
        raise RequestError(
            f"mtp: {checkpoint.name} has no head that predicts further ahead (its file may have left it out); lookup "
            "needs none",
            "speculate",
        )


def _head(engine: Engine) -> BaseDrafter:
    from unspool.engine.head_runner import make_head_runner
    from unspool.models.draft_head import build_head
    from unspool.speculate.mtp import MtpDrafter

    head = draft_head_of(engine.checkpoint.config)
    assert head is not None  # check_head has looked
    model = build_head(head, engine.runner.model, engine.checkpoint.draft_weights())
    return MtpDrafter(make_head_runner(model, engine.config, engine.runner.kv.num_blocks[0]))


def _early_exit(engine: Engine, detail: str) -> BaseDrafter:
    from unspool.speculate.model import ModelDrafter

    most = engine.checkpoint.config.num_layers
    num_layers = int(detail) if detail else max(1, most // 2)
    if not 1 <= num_layers <= most:
        raise RequestError(f"early-exit has {detail!r} layers; the model has {most}", "speculate")
    _check_stateless(engine.runner.model, "early-exit")
    cut = engine.runner.model.early(num_layers)
    return ModelDrafter("early-exit", make_runner(cut, engine.config, engine.runner.kv.num_blocks[0]))


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
    return ModelDrafter("model", make_runner(model, engine.config, engine.runner.kv.num_blocks[0]))


def _check_stateless(model: Decoder, what: str) -> None:
    """A drafter goes back with every rejected draft, which it can only where layers keep keys and values alone."""
    if state_bytes(model.architecture.storage):
        raise RequestError(f"{what}: models with recurrent layers cannot draft; use lookup", "speculate")

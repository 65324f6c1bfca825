"""What the engine does and what it runs on: its steps, its cache, its machine, its parameters. Counts, never tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from unspool.errors import RequestError
from unspool.machine import free_memory, num_cores
from unspool.models.registry import architecture_of
from unspool.ops.storage import kv_bytes_per_token, state_bytes
from unspool.params import SamplingParams
from unspool.params.order import PRESETS
from unspool.params.registry import PARAMETERS
from unspool.params.resolve import jsonable
from unspool.plan import NO_BLOCK
from unspool.server.fields import field
from unspool.server.kinds import published
from unspool.server.pages import json_response
from unspool.server.service import Service
from unspool.server.sse import EventStream, Write, frame
from unspool.version import VERSION

if TYPE_CHECKING:
    from unspool.cache.blocks import Blocks
    from unspool.engine.engine import Engine
    from unspool.engine.steps import StepStats
    from unspool.models.costs import StepCosts

POLL_SECONDS = 0.1  # between two reads of the engine's history, while a client follows it
MOST_STEPS = 2048  # in one event


# Steps --------------------------------------------------------------------------------------------------------------
async def steps(service: Service, request: Request) -> Any:
    """The steps after number `since` as one object; with `follow=1`, these and all later steps as events."""
    since = _integer(request, "since", -1)
    if request.query_params.get("follow") not in ("1", "true"):
        return json_response(_steps_after(service, since))
    stop = asyncio.Event()

    async def feed(write: Write) -> None:
        last = since
        while not stop.is_set() and service.state == "ready":
            news = _steps_after(service, last)
            if news["steps"]:
                last = news["steps"][-1]["number"]
                write(frame(news))
            try:
                await asyncio.wait_for(stop.wait(), POLL_SECONDS)
            except TimeoutError:
                continue

    return EventStream(feed, stop.set, ping_interval=service.config.ping_interval)


def _integer(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise RequestError(f"{name} is {text[:40]!r}; an integer is needed", name) from None


def _steps_after(service: Service, since: int) -> dict[str, Any]:
    """The remembered steps, oldest first; `dropped` is the number of steps after `since` that are no longer kept."""
    engine = service.here[0].engine
    known = engine.steps.history
    news = [step for step in known if step.number > since]
    first = news[0].number if news else since + 1
    return {
        "object": "steps",
        "now": time.perf_counter(),
        "dropped": max(0, first - since - 1) if since >= 0 else 0,
        "steps": [_step(step, engine.steps.costs) for step in news[:MOST_STEPS]],
    }


def _step(step: StepStats, costs: StepCosts) -> dict[str, Any]:
    names = ("request", "start", "tokens", "samples")
    entry = step._asdict()
    parts = zip(*(entry.pop(column) for column in ("requests", "first", "tokens", "samples")), strict=True)
    flops = sum(map(costs.prefill_flops, step.tokens, step.first))
    works = [dict(zip(names, part, strict=True)) for part in parts]
    return {**entry, "num_bytes": step.num_bytes, "flops": int(flops), "works": works}


# The cache ----------------------------------------------------------------------------------------------------------
async def cache(service: Service, request: Request) -> Response:
    return json_response(await service.here[0].driver.call_async(cache_map))


def cache_map(engine: Engine) -> dict[str, Any]:
    """What each block and each state of recurrent layers is used for, as runs of equal uses, and which of them each
    request has."""
    scheduler, blocks, recurrent = engine.scheduler, engine.scheduler.blocks, engine.scheduler.states
    slots = None if recurrent is None else recurrent.slots
    requests = [(one, "running") for one in scheduler.running] + [(one, "waiting") for one in scheduler.waiting]
    return {
        "object": "cache",
        "num_blocks": blocks.num_blocks,
        "block_size": blocks.block_size,
        **_uses_of_blocks(blocks),
        "windows": [
            {
                "window": group.window,
                "num_blocks": group.num_blocks,
                **_uses_of_blocks(group),
                "evictions": group.num_evictions,
            }
            for group in scheduler.tables.others
        ],
        "states": None
        if slots is None
        else {
            "num_slots": slots.num_slots,
            "bytes": state_bytes(architecture_of(engine.checkpoint.config).storage),
            **_uses([slots.state(slot) for slot in range(slots.num_slots)], ("free", "held", "snapshot")),
            "evictions": slots.num_evictions,
        },
        "evictions": blocks.num_evictions,
        "prefix_queries": scheduler.prefix_queries,
        "prefix_hits": scheduler.prefix_hits,
        "preemptions": scheduler.num_preemptions,
        "requests": [
            {
                "number": one.number,
                "state": state,
                "prompt_tokens": one.num_prompt,
                "tokens": len(one.tokens),
                "computed": one.num_computed,
                "cached": one.num_cached,
                "blocks": [block for block in one.blocks if block != NO_BLOCK],
                "states": [] if recurrent is None else recurrent.held_by(one),
            }
            for one, state in requests
        ],
    }


def _uses_of_blocks(blocks: Blocks) -> dict[str, Any]:
    return _uses([blocks.state(block) for block in range(blocks.num_blocks)], ("free", "cached", "private", "shared"))


def _uses(uses: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """The count of each use, and all uses in order, as runs."""
    runs = [[use, len(list(run))] for use, run in groupby(uses)]
    return {"counts": {name: uses.count(name) for name in names}, "map": runs}


# The machine and the model ------------------------------------------------------------------------------------------
async def machine(service: Service, request: Request) -> Response:
    llm, meter = service.here
    engine = llm.engine
    config = engine.checkpoint.config
    return json_response(
        {
            "object": "machine",
            "cores": num_cores(),
            "threads": engine.config.threads or num_cores(),
            "free_memory": free_memory(),
            "device": engine.ops.name,
            "kernels": engine.ops.kernel_set,
            "bandwidth": {"ceiling": meter.ceiling, "fastest": engine.steps.fastest or None},
            "compute": {"ceiling": meter.compute},
            "weights_bytes": int(engine.steps.costs.weight_bytes()),
            "kv_bytes_per_token": kv_bytes_per_token(architecture_of(config).storage, engine.config.kv_dtype),
            "layers": config.num_layers,
        }
    )


async def capabilities(service: Service, request: Request) -> Response:
    llm, _ = service.here
    engine, tokenizer = llm.engine, llm.tokenizer
    checkpoint = engine.checkpoint
    resolved = SamplingParams(seed=0).resolve(checkpoint.generation, vocab_size=checkpoint.config.vocab_size).as_dict()
    parameters = [
        {
            "name": one.name,
            "group": one.group,
            "help": one.help,
            "schema": published(field(one)),
            "value": None if one.name == "seed" else resolved[one.name]["value"],
            "origin": "drawn" if one.name == "seed" else resolved[one.name]["origin"],
        }
        for one in PARAMETERS
        if not one.is_local
    ]
    return json_response(
        {
            "object": "capabilities",
            "version": VERSION,
            "model": service.name,
            "models": list(service.names),
            "context_length": engine.context_length,
            "vocab_size": checkpoint.config.vocab_size,
            "has_template": service.llm.template is not None,
            "special_tokens": {str(id): tokenizer.token_text(id) for id in sorted(tokenizer.special_ids)[:256]},
            "end_ids": sorted(engine.end_ids),
            "drafters": list(engine.speculation.drafters),
            "orders": {name: jsonable(preset.stages) for name, preset in PRESETS.items()},
            "receipt": service.llm.receipt(0).as_dict(),
            "overrides": [each.as_dict() for each in checkpoint.overrides],
            "parameters": parameters,
        }
    )

"""Reports on an answer: one line of text, or one JSON object."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from unspool.cli.terminal import note, warn
from unspool.results import figures

if TYPE_CHECKING:
    from unspool.ceilings import Utilization
    from unspool.events import Token
    from unspool.llm import LLM
    from unspool.results import Completion, Result

ENDINGS = {
    "eos": "",  # the usual ending is not mentioned
    "length": "cut at its length",
    "constraint": "complete by its constraint",
    "abort": "interrupted",
    "deadline": "cut at its deadline",
    "repetition": "ended because it repeated itself",
}


def summary(result: Result, used: Utilization | None = None) -> str:
    """`42 tokens · first after 0.21 s · 108.3 tokens/s · seed 7`: the seed reproduces the answer."""
    timings, usage = result.timings, result.usage
    parts = [f"{usage.completion_tokens:,} token{'' if usage.completion_tokens == 1 else 's'}"]
    if timings.first_token is not None:
        share = "" if used is None or used.prefill_compute is None else f" ({used.prefill_compute:.0%} of compute)"
        parts.append(f"first after {timings.first_token:.2f} s{share}")
    if timings.tokens_per_second is not None:
        share = ""
        if used is not None and used.mbu is not None:
            megabytes = (used.weight_bytes + used.cache_bytes) / 1e6
            share = f" ({used.mbu:.0%} of memory bandwidth; {megabytes:,.0f} MB a token)"
        parts.append(f"{timings.tokens_per_second:.1f} tokens/s{share}")
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens cached")
    endings = {_ending(choice) for choice in result.choices}
    parts += sorted(ending for ending in endings if ending)
    if not result.params.greedy:
        parts.append(f"seed {result.params.seed}")
    return " · ".join(parts)


def _ending(choice: Completion) -> str:
    if choice.finish_reason != "stop":
        return ENDINGS[choice.finish_reason]
    return f"stopped at token {choice.stop}" if isinstance(choice.stop, int) else f"stopped at {choice.stop!r}"


def say(result: Result, *, quiet: bool = False, used: Utilization | None = None) -> None:
    """Print warnings; unless `quiet` also the summary, with the shares of the machine that it used, if known."""
    for warning in result.warnings:
        warn(warning)
    if not quiet:
        note(summary(result, used))


def as_object(llm: LLM, result: Result, load_seconds: float) -> dict[str, Any]:
    """The whole answer, ready for JSON. With several choices, the first one's fields are the object's own."""
    out: dict[str, Any] = {"model": llm.checkpoint.name, **_choice(llm, result.choices[0])}
    if len(result.choices) > 1:
        out["choices"] = [_choice(llm, choice) for choice in result.choices]
    if result.prompt_logprobs is not None:
        out["prompt_logprobs"] = [None if token is None else _token(llm, token) for token in result.prompt_logprobs]
    used = llm.utilization(result)
    return out | {
        "utilization": None if used is None else used.as_dict(),
        "params": result.params.as_dict(),
        "warnings": list(result.warnings),
        "usage": dataclasses.asdict(result.usage) | {"total_tokens": result.usage.total_tokens},
        "timings": {"load": load_seconds, **dataclasses.asdict(result.timings)},
        "receipt": result.receipt.as_dict(),
    }


def _choice(llm: LLM, choice: Completion) -> dict[str, Any]:
    out: dict[str, Any] = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop": choice.stop,
        "seed": choice.seed,
    }
    if choice.logprobs is not None:
        out["logprobs"] = [_token(llm, token) for token in choice.tokens]
    return out | figures(choice)


def _token(llm: LLM, token: Token) -> dict[str, Any]:
    top = [{"id": id, "text": text_of(llm, id), "logprob": logprob} for id, logprob in token.top]
    return {"id": token.id, "text": text_of(llm, token.id), "logprob": token.logprob, "top": top}


def text_of(llm: LLM, token: int) -> str:
    """A token's text for display: part of a character is shown as U+FFFD."""
    return llm.tokenizer.token_text(token)

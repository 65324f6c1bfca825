"""Endpoints that answer in one piece: models, tokens, scores."""

from __future__ import annotations

import time
from typing import Any

from unspool.errors import RequestError
from unspool.events import Token
from unspool.params import SamplingParams
from unspool.server.chat import conversation, toolbox_of
from unspool.server.dialect import Body, text_prompts, token_entry
from unspool.server.service import Job, Service, usage_of


def model_entry(service: Service, name: str) -> Body:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "unspool",
        "root": service.llm.checkpoint.name,
        "aliases": [other for other in service.names if other != name],
        "max_model_len": service.llm.engine.context_length,
    }


async def tokenize(service: Service, body: Body) -> Body:
    has_prompt, has_messages = "prompt" in body, "messages" in body
    if has_prompt == has_messages:
        raise RequestError("give either prompt or messages", "prompt")
    misplaced = ("add_generation_prompt", "tools", "chat_template_kwargs") if has_prompt else _PROMPT_ONLY
    for name in misplaced:
        if name in body:
            raise RequestError(f"{name} does nothing with {'a prompt' if has_prompt else 'messages'}", name)
    if has_prompt:
        ids = service.llm.tokenizer.encode(
            body["prompt"],
            add_special=body.get("add_special_tokens", True),
            parse_special=body.get("parse_special", False),
        )
    else:
        ids, _ = await service.render(
            conversation(body["messages"]),
            toolbox_of(body),
            body.get("chat_template_kwargs", {}),
            add_generation_prompt=body.get("add_generation_prompt", True),
        )
    answer: Body = {"count": len(ids), "max_model_len": service.llm.engine.context_length, "tokens": ids}
    if body.get("return_token_strs"):
        answer["token_strs"] = [service.llm.tokenizer.token_text(id) for id in ids]
    return answer


_PROMPT_ONLY = ("add_special_tokens", "parse_special")


async def detokenize(service: Service, body: Body) -> Body:
    size = service.llm.checkpoint.config.vocab_size
    for index, id in enumerate(body["tokens"]):
        if id >= size:
            raise RequestError(f"tokens[{index}] is {id}; the vocabulary has {size:,} tokens", f"tokens[{index}]")
    return {"prompt": service.llm.tokenizer.decode(body["tokens"], skip_special=body.get("skip_special_tokens", False))}


async def embeddings(service: Service, body: Body) -> Body:
    raise RequestError(f"{service.name} writes text; it has no embeddings to give", "model", "model_does_not_embed")


async def prepare_score(service: Service, body: Body) -> Job:
    params = SamplingParams(
        max_tokens=0,
        prompt_logprobs=body.get("top_logprobs", 0),
        deadline_ms=body.get("deadline_ms"),
        priority=body.get("priority", 0),
    )
    prompts = []
    for prompt in text_prompts(body["input"], "input"):
        ids = await service.encode(prompt) if isinstance(prompt, str) else prompt
        prompts.append((ids, params))
    return Job(prompts)


def score_body(service: Service, run: Any) -> Body:
    data = []
    for index, (choice, (ids, _)) in enumerate(zip(run.answer.choices, run.job.prompts, strict=True)):
        scored: list[Token | None] = choice.end.details.get("prompt_logprobs") or []
        known = [token.logprob for token in scored if token is not None and token.logprob is not None]
        data.append(
            {
                "object": "score",
                "index": index,
                "finish_reason": choice.end.reason,
                "num_tokens": len(ids),
                "logprob": sum(known),
                "tokens": [
                    token_entry(token or Token(id), service.llm.tokenizer)
                    for id, token in zip(ids, scored, strict=False)
                ],
            }
        )
    prompt, completion, cached = usage_of(run)
    return {
        "object": "list",
        "created": int(time.time()),
        "model": service.name,
        "data": data,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
        "unspool": service.report(run),
    }

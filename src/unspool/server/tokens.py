"""Token ids and texts, in both directions; embeddings, which models of text refuse."""

from __future__ import annotations

from unspool.errors import RequestError
from unspool.server.chat_completions import conversation, toolbox_of
from unspool.server.dialect import Body, how_of
from unspool.server.service import Service


def tokenize(service: Service, body: Body) -> Body:
    has_prompt, has_messages = "prompt" in body, "messages" in body
    if has_prompt == has_messages:
        raise RequestError("give either prompt or messages", "prompt")
    misplaced = _MESSAGES_ONLY if has_prompt else _PROMPT_ONLY
    for name in misplaced:
        if name in body:
            raise RequestError(f"{name} does nothing with {'a prompt' if has_prompt else 'messages'}", name)
    if has_prompt:
        service.check_length([body["prompt"]], "prompt")
        ids = service.llm.tokenizer.encode(
            body["prompt"],
            add_special=body.get("add_special_tokens", True),
            parse_special=body.get("parse_special", False),
        )
    else:
        prompt = service.render(
            conversation(body["messages"]),
            toolbox_of(body),
            body.get("chat_template_kwargs", {}),
            how=how_of(body),
        )
        ids = prompt.ids
    answer: Body = {"count": len(ids), "max_model_len": service.llm.engine.context_length, "tokens": ids}
    if body.get("return_token_strs"):
        answer["token_strs"] = [service.llm.tokenizer.token_text(id) for id in ids]
    return answer


_PROMPT_ONLY = ("add_special_tokens", "parse_special")
_MESSAGES_ONLY = ("add_generation_prompt", "continue_final_message", "enable_thinking", "tools", "chat_template_kwargs")


def detokenize(service: Service, body: Body) -> Body:
    size = service.llm.checkpoint.config.vocab_size
    for index, id in enumerate(body["tokens"]):
        if id >= size:
            raise RequestError(f"tokens[{index}] is {id}; the vocabulary has {size:,} tokens", f"tokens[{index}]")
    return {"prompt": service.llm.tokenizer.decode(body["tokens"], skip_special=body.get("skip_special_tokens", False))}


def embeddings(service: Service, body: Body) -> Body:
    raise RequestError(f"{service.name} writes text; it has no embeddings to give", "model", "model_does_not_embed")

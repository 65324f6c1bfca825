"""Token ids and texts, in both directions; embeddings, which models of text refuse."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from unspool.errors import RequestError
from unspool.server.chat_completions import conversation, toolbox_of
from unspool.server.dialect import Body, how_of
from unspool.server.pages import json_response
from unspool.server.service import Service
from unspool.text.tokenizer import Tokenizer


def tokenize(service: Service, body: Body) -> Body:
    given = [name for name in _FIELDS if name in body]
    if len(given) != 1:
        raise RequestError("give one of prompt, content and messages", "prompt")
    for name in {name for names in _FIELDS.values() for name in names} - set(_FIELDS[given[0]]):
        if name in body:
            raise RequestError(f"{name} does nothing with {given[0]}", name)
    if given == ["content"]:
        return _tokenize_content(service, body)
    if given == ["prompt"]:
        service.check_length([body["prompt"]], "prompt")
        tokenizer, text = service.llm.tokenizer, body["prompt"]
        ids = tokenizer.encode(
            text,
            add_special=body.get("add_special_tokens", True),
            parse_special=body.get("parse_special", _is_control_token(tokenizer, text)),
        )
    else:
        prompt = service.render(
            conversation(body["messages"]),
            toolbox_of(body),
            body.get("chat_template_kwargs", {}),
            how=how_of(body),
        )
        start = service.llm.tokenizer.encode("") if body.get("add_special_tokens") else []
        ids = prompt.ids if prompt.ids[: len(start)] == start else [*start, *prompt.ids]
    texts = [service.llm.tokenizer.token_text(id) for id in ids] if body.get("return_token_strs") else None
    return {
        "count": len(ids),
        "max_model_len": service.llm.engine.context_length,
        "tokens": ids,
        "token_strs": texts,
    }


def _is_control_token(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is exactly one control token: then the request wants that token's id."""
    first = next(tokenizer.control_marks.split(text), "")
    return isinstance(first, int) and tokenizer.control_marks.text_of(first) == text


# The fields that are allowed with each form of input.
_FIELDS = {
    "prompt": ("add_special_tokens", "parse_special", "return_token_strs"),
    "content": ("add_special", "parse_special", "with_pieces"),
    "messages": (
        "add_generation_prompt", "continue_final_message", "enable_thinking", "tools", "chat_template_kwargs",
        "add_special_tokens", "return_token_strs",
    ),
}  # fmt: skip


def _tokenize_content(service: Service, body: Body) -> Body:
    """The same as llama.cpp's server does."""
    service.check_length([body["content"]], "content")
    tokenizer = service.llm.tokenizer
    ids = tokenizer.encode(
        body["content"], add_special=body.get("add_special", False), parse_special=body.get("parse_special", True)
    )
    if not body.get("with_pieces"):
        return {"tokens": ids}
    return {"tokens": [{"id": id, "piece": _piece(tokenizer.token_bytes(id))} for id in ids]}


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def detokenize(service: Service, body: Body) -> Body:
    size = service.llm.checkpoint.config.vocab_size
    for index, id in enumerate(body["tokens"]):
        if id >= size:
            raise RequestError(f"tokens[{index}] is {id}; the vocabulary has {size:,} tokens", f"tokens[{index}]")
    text = service.llm.tokenizer.decode(body["tokens"], skip_special=body.get("skip_special_tokens", False))
    return {"prompt": text, "content": text}  # vLLM's name and llama.cpp's


async def tokenizer_info(service: Service, request: Request) -> Response:
    """Information that lm-eval and vLLM's clients request instead of loading the tokenizer's files."""
    llm = service.llm
    named = llm.tokenizer.named_tokens
    known = {name: named.get(name) or None for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return json_response(
        {
            "tokenizer_class": type(llm.tokenizer).__name__,
            **known,
            "chat_template": None if llm.template is None else llm.template.source,
            "model_max_length": llm.engine.context_length,
            "vocab_size": llm.tokenizer.vocab_size,
        }
    )


def embeddings(service: Service, body: Body) -> Body:
    raise RequestError(f"{service.name} writes text; it has no embeddings to give", "model", "model_does_not_embed")

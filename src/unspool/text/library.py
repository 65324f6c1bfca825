"""The `tokenizers` library, called so that other threads go on."""

from __future__ import annotations

from typing import Any

LONG = 4096  # characters


def encode(library: Any, text: str) -> Any:
    """The library's encoding of a text. Only its calls for many texts let other threads run; for a short text they
    cost more than they give."""
    if len(text) < LONG:
        return library.encode(text, add_special_tokens=False)
    return library.encode_batch([text], add_special_tokens=False)[0]


def cut(pre_tokenizer: Any, text: str) -> list[str]:
    """The words that a pre-tokenizer cuts a text into."""
    if len(text) < LONG:
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]
    from tokenizers import Tokenizer, models

    one_token = Tokenizer(models.WordLevel({"": 0}, unk_token=""))  # whatever the word
    one_token.pre_tokenizer = pre_tokenizer
    return [text[begin:end] for begin, end in encode(one_token, text).offsets]

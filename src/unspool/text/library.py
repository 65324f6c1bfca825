"""The `tokenizers` library with rules of our own, called so that other threads go on, and a panic is a RequestError.

What a stranger's tokenizer.json says runs elsewhere: see `tokenizer_worker`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unspool.errors import RequestError

LONG = 4096  # characters


def encode(library: Any, text: str) -> Any:
    """The library's encoding of a text. Only its calls for many texts let other threads run; for a short text they
    cost more than they give."""
    with _panic_refused():
        if len(text) < LONG:
            return library.encode(text, add_special_tokens=False)
        return library.encode_batch([text], add_special_tokens=False)[0]


def cut(pre_tokenizer: Any, text: str) -> list[str]:
    """The words that a pre-tokenizer cuts a text into."""
    if len(text) < LONG:
        with _panic_refused():
            return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]
    from tokenizers import Tokenizer, models

    one_token = Tokenizer(models.WordLevel({"": 0}, unk_token=""))  # whatever the word
    one_token.pre_tokenizer = pre_tokenizer
    return [text[begin:end] for begin, end in encode(one_token, text).offsets]


@contextmanager
def _panic_refused() -> Iterator[None]:
    """Ten million spaces in a row are more steps than the library's expressions may take: it panics, and a panic is no
    Exception, so it would end the thread that it comes to."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RequestError(f"the text cannot be cut into words: {error}", "prompt") from error

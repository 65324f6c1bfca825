"""The `tokenizers` library with our own rules, called so that other threads continue, and a panic is a RequestError.

An untrusted tokenizer.json runs in another process: see `tokenizer_worker`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unspool.errors import RequestError

LONG = 4096  # characters


def encode(library: Any, text: str) -> Any:
    """The library's encoding of a text. Only its batch calls release the GIL; for a short text they cost more than they
    gain."""
    with _panic_refused():
        if len(text) < LONG:
            return library.encode(text, add_special_tokens=False)
        return library.encode_batch([text], add_special_tokens=False)[0]


def cut(pre_tokenizer: Any, text: str) -> list[str]:
    """The words that a pre-tokenizer splits a text into."""
    if len(text) < LONG:
        with _panic_refused():
            return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]
    from tokenizers import Tokenizer, models

    one_token = Tokenizer(models.WordLevel({"": 0}, unk_token=""))  # whatever the word
    one_token.pre_tokenizer = pre_tokenizer
    return [text[begin:end] for begin, end in encode(one_token, text).offsets]


@contextmanager
def _panic_refused() -> Iterator[None]:
    """Ten million spaces in a row exceed the step limit of the library's expressions: it panics. A panic is not an
    Exception, so it would end the calling thread."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RequestError(f"the text cannot be cut into words: {error}", "prompt") from error

"""Text to token ids and back. `from_gguf` and `from_directory` build a `Tokenizer` from a model's files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from unspool.errors import RequestError
from unspool.text.detokenizer import Detokenizer
from unspool.text.marks import MarkSplitter
from unspool.text.vocabulary import Vocabulary


class Encoder(Protocol):
    """The part that differs between kinds of vocabulary. It adds nothing before or after the text."""

    def encode(self, text: str, parse_special: bool) -> list[int]: ...


class Tokenizer:
    """A model's vocabulary, its rule for splitting text into tokens, and its marks for beginnings and ends.

    `strips_leading_space`: encoding put a space in front of the text, so decoding takes one away there.
    `named_tokens`: texts by the names that chat templates know them by (`eos_token`, `pad_token`, …).
    `notes` lists what the file did not define and what was assumed.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: Encoder,
        *,
        bos_id: int | None,
        eos_ids: Collection[int],
        adds_bos: bool,
        strips_leading_space: bool,
        fingerprint: Callable[[], str],
        named_tokens: Mapping[str, str | list[str]] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._fingerprint = fingerprint
        self.vocab_size = len(vocabulary)
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.special_ids = vocabulary.special
        self.adds_bos = adds_bos
        self.strips_leading_space = strips_leading_space
        self.named_tokens = dict(named_tokens or {})
        self.notes = tuple(notes)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers with the same vocabulary and merges, whatever file they came from."""
        return self._fingerprint()

    @cached_property
    def control_marks(self) -> MarkSplitter:
        """Finds the names of control tokens in a text."""
        return MarkSplitter({self.token_text(token_id): token_id for token_id in self.special_ids})

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of `text`.

        With `add_special`, a model that wants BOS gets it exactly once, even where the text (a rendered chat
        template) already starts with it. Without `parse_special`, `<|im_end|>` in a text is nine characters and no
        control token: what a user writes cannot end a turn.
        """
        _require_characters(text)
        ids = self._encoder.encode(text, parse_special)
        if not (add_special and self.adds_bos):
            return ids
        own = 0
        while own < len(ids) and ids[own] == self.bos_id:
            own += 1
        assert self.bos_id is not None, "a tokenizer that adds BOS has one"
        return [self.bos_id, *ids[own:]]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, prompt_ids: Sequence[int] = ()) -> str:
        """The text of `ids`: exactly what a `Detokenizer` returns in total for the same ids."""
        detokenizer = Detokenizer(self, skip_special=skip_special, prompt_ids=prompt_ids)
        return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes a token stands for; a special token stands for its literal text."""
        return self._vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """For display: a part of a character is shown as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _require_characters(text: str) -> None:
    """JSON can carry half a surrogate pair; no vocabulary can."""
    try:
        text.isascii() or text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start:,}", "prompt"
        ) from error


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes (keys `tokenizer.ggml.*`)."""
    from unspool.text import gguf_vocabulary

    return gguf_vocabulary.build(metadata)


def from_directory(
    path: Path, config: Mapping[str, Any] | None = None, *, extra_eos: Collection[int] = ()
) -> Tokenizer:
    """The tokenizer of a Hugging Face directory. `config`: the model's config.json; `extra_eos`: end tokens known
    from elsewhere, as from generation_config.json."""
    from unspool.text import directory

    return directory.build(Path(path), config or {}, extra_eos)

"""The vocabulary beside the embedding: sizes that differ, tokens that are doubled or were never trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from unspool.doctor.finding import Finding
from unspool.doctor.subject import Subject

UNTRAINED = 0.02  # of the median row's norm: a token that training never touched stays near its start


def check_sizes(subject: Subject) -> Iterator[Finding]:
    rows, tokens = subject.checkpoint.config.vocab_size, subject.tokenizer.vocab_size
    if tokens > rows:
        yield Finding(
            "more-tokens-than-rows", "error", "certain",
            f"the tokenizer has {tokens:,} tokens, the embedding {rows:,} rows",
            "a text with one of the others cannot be computed",
            "resize the embedding to the tokenizer, or use the tokenizer that the model was trained with",
        )  # fmt: skip
    elif tokens < rows:
        yield Finding(
            "more-rows-than-tokens", "note", "certain",
            f"the embedding has {rows:,} rows, the tokenizer {tokens:,} tokens",
            "usually nothing: rows are padded to a round number; a sampled one would print nothing",
            "none is needed",
        )  # fmt: skip


def check_duplicates(subject: Subject) -> Iterator[Finding]:
    tokenizer = subject.tokenizer
    count = Counter(
        text
        for token in range(tokenizer.vocab_size)
        if token not in tokenizer.special_ids and len(text := tokenizer.token_bytes(token)) > 1
    )
    doubled = [text.decode("utf-8", "replace") for text, times in count.items() if times > 1]
    if doubled:
        yield Finding(
            "tokens-doubled", "note", "certain",
            f"{len(doubled):,} texts have more than one token, as {doubled[0]!r}",
            "the model may choose the one that it never saw in training; logprobs of such words are split",
            "none is needed unless the vocabulary was edited",
        )  # fmt: skip


def check_untrained(subject: Subject) -> Iterator[Finding]:
    """Embedding rows that are zero, or nearly: tokens that no training text had."""
    import numpy as np


    weight = subject.checkpoint.weights.get("token_embd.weight")
    if weight is None or len(weight.shape) != 2:
        return
    norms = np.concatenate([
        np.linalg.norm(weight.dequantize_rows(np.arange(start, min(start + 4096, weight.shape[0]))), axis=1)
        for start in range(0, weight.shape[0], 4096)
    ])  # fmt: skip
    named = norms[: subject.tokenizer.vocab_size]
    unused = np.flatnonzero(named < UNTRAINED * np.median(norms))
    if unused.size:
        yield Finding(
            "tokens-untrained", "note", "likely",
            f"{unused.size:,} tokens look untrained, the first {subject.name_of(int(unused[0]))}",
            "a prompt that has one gets a strange answer", "none is needed unless your prompts have them",
        )  # fmt: skip


CHECKS = (check_sizes, check_duplicates, check_untrained)

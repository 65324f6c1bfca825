"""Writes tests/fixtures/text/tokenizers: small vocabularies, and the ids that their own libraries give for some texts.

    python scripts/fixture_tokenizers.py        needs sentencepiece, tiktoken, tokenizers

bpe.model and unigram.model are SentencePiece's, trained on this repository's documents; tekken.json has the form of
Mistral's. expected.json: for each file, the ids of each text.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "fixtures" / "text" / "tokenizers"
PIECES = [
    " ", "  ", "   ", "\n", "\t", "\r\n", "é", "e\u0301", "☃", "🙂", "中文", "カナ", "한국어", "½", "ﬁ", "①", "\u00a0",
    "12345", "3.14", "<s>", "</s>", "<unk>", "[INST]", "<tool>", "--", "---", "▁", "don't", "HTTPServer", "camelCase",
    "the ", "model", "weights ", "token", "prompt.", "x" * 40,
]  # fmt: skip
# Some of Unicode's, and one of two characters: the rules of a whole normalization take 240 KB.
RULES = {"ﬁ": "fi", "①": "1", "½": "1/2", "e\u0301": "é", "\u00a0": " ", "\n": " ", "\t": " ", "\u3000": " "}
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RESERVED = 24


def texts() -> list[str]:
    rng = random.Random(5)
    found = [*PIECES, "", "Hello world", "  two  spaces  in a row  ", "naïve café Ünïcode"]
    found += ["".join(rng.choices(PIECES, k=rng.randint(2, 9))) for _ in range(60)]
    document = (ROOT / "README.md").read_text("utf-8")
    return found + [document[at : at + 150] for at in range(0, 1500, 150)]


def corpus() -> list[str]:
    names = ("README.md", "docs/sampling.md", "docs/models.md")
    return [line for name in names for line in (ROOT / name).read_text("utf-8").splitlines() if line.strip()]


def train(name: str, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """Files keep the names they were trained from, so these are relative."""
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if options.pop("rules", False):
            options["normalization_rule_tsv"] = "rules.tsv"
            Path("rules.tsv").write_text("".join(f"{codes(old)}\t{codes(new)}\n" for old, new in RULES.items()))
        else:
            options["normalization_rule_name"] = "identity"
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(corpus()), model_writer=model, minloglevel=2, hard_vocab_limit=False, **options
        )
    (FOLDER / f"{name}.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def codes(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)


def tekken() -> tiktoken.Encoding:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    ordered = sorted(library.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(byte_of[c] for c in text) for text, _ in ordered if len(text) > 1]
    marks = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
    content = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) - 20 + RESERVED,  # files have more tokens than are used
            "default_num_special_tokens": RESERVED,
            "version": "v7",
        },
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": text != "[TOOL_CALLS]"} for rank, text in enumerate(marks)
        ],
    }
    (FOLDER / "tekken.json").write_text(json.dumps(content))
    ranks = {token: rank for rank, token in enumerate(tokens[:-20])}
    return tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def byte_characters() -> list[str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    bpe = train("bpe", model_type="bpe", byte_fallback=True, vocab_size=600, remove_extra_whitespaces=False)
    unigram = train("unigram", model_type="unigram", rules=True, vocab_size=400, user_defined_symbols=["<tool>", "--"])
    encoding = tekken()
    expected = {
        "bpe": {text: bpe.encode(text) for text in texts()},
        "unigram": {text: unigram.encode(text) for text in texts()},
        "tekken": {text: [RESERVED + rank for rank in encoding.encode_ordinary(text)] for text in texts()},
    }
    (FOLDER / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=0) + "\n")
    print(*(f"{file.name}: {file.stat().st_size:,} bytes" for file in sorted(FOLDER.iterdir())), sep="\n")


if __name__ == "__main__":
    main()

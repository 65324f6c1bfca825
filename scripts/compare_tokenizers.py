"""Tokenizers beside those of other engines: the same ids for the same texts.

    python scripts/compare_tokenizers.py [--vocabularies DIR] [--models DIR] [--texts N]

DIR of --vocabularies: llama.cpp's vocabularies with their tests (`ggml-vocab-NAME.gguf`, `.inp`, `.out`; its source has
them in models/). DIR of --models: files named `*.model*`, which the package sentencepiece reads, and `tekken*.json`,
which mistral-common reads (its package brings some of both). The last line is JSON: texts that differ, by file.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from unspool.errors import ModelError
from unspool.text.tokenizer import Tokenizer, from_directory, from_gguf
from unspool.weights.gguf import open_gguf

ROOT = Path(__file__).parent.parent
SEPARATOR = "\n__ggml_vocab_test__\n"
PIECES = [
    " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "é", "e\u0301", "☃", "🙂", "👩‍👩‍👧", "中文，", "カナ", "한국어",
    "नमस्ते", "ไทย", "½", "ﬁ", "①", "Å", "\u00a0", "\u2028", "\u3000", "ＡＢＣ", "\u200b", "\u0301", "ß", "İ", "𝔘",
    "العربية", "12345", "3.14", "<s>", "</s>", "[INST]", "▁", "▁▁", "x" * 70, "don't", "HTTPServer",
    "camelCase",
]  # fmt: skip


def texts(count: int) -> Iterator[str]:
    rng = random.Random(3)
    document = "".join(file.read_text("utf-8") for file in sorted((ROOT / "docs").glob("*.md")))

    def part(longest: int) -> str:
        at = rng.randrange(len(document))
        return document[at : at + rng.randrange(1, longest)]

    for index in range(count):
        pieces = (rng.choice(PIECES) if rng.random() < 0.6 else part(12) for _ in range(rng.randrange(15)))
        yield part(300) if index % 2 else "".join(pieces)


def differing(tokenizer: Tokenizer, encode: Callable[[str], list[int]], given: Iterator[str]) -> int:
    return sum(tokenizer.encode(text, add_special=False) != encode(text) for text in given)


def compare_vocabularies(folder: Path) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for file in sorted(folder.glob("ggml-vocab-*.gguf")):
        try:
            tokenizer = from_gguf(open_gguf(file).metadata)
        except ModelError as error:
            found[file.name] = f"refused: {error}"
            continue
        inputs, outputs = file.with_suffix(".gguf.inp"), file.with_suffix(".gguf.out")
        if inputs.exists():
            ids = [[int(each) for each in line.split()] for line in outputs.read_text().split("\n")]
            given = inputs.read_text("utf-8").split(SEPARATOR)
            wanted = dict(zip(given, ids, strict=False))
            found[file.name] = differing(tokenizer, wanted.__getitem__, iter(wanted))
    return found


def compare_models(folder: Path, count: int) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for file in sorted([*folder.glob("*.model*"), *folder.glob("tekken*.json")]):
        with tempfile.TemporaryDirectory() as temporary:
            is_tekken = file.suffix == ".json"
            shutil.copy(file, Path(temporary) / ("tekken.json" if is_tekken else "tokenizer.model"))
            tokenizer = from_directory(Path(temporary))
            encode = tekken(file) if is_tekken else sentencepiece(file)
            found[file.name] = differing(tokenizer, encode, texts(count))
    return found


def sentencepiece(file: Path) -> Callable[[str], list[int]]:
    import sentencepiece

    encode: Callable[[str], list[int]] = sentencepiece.SentencePieceProcessor(model_file=str(file)).encode
    return encode


def tekken(file: Path) -> Callable[[str], list[int]]:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    library = Tekkenizer.from_file(file)
    return lambda text: library.encode(text, False, False)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vocabularies", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--texts", type=int, default=2000)
    options = parser.parse_args()
    found: dict[str, int | str] = {}
    if options.vocabularies:
        found |= compare_vocabularies(options.vocabularies)
    if options.models:
        found |= compare_models(options.models, options.texts)
    for name, result in found.items():
        print(f"{name}: {result if isinstance(result, str) else f'{result} texts differ'}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

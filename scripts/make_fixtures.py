"""Record what an independent implementation says, so that the tests need neither torch nor transformers.

    python scripts/make_fixtures.py --model SmolLM2-135M-Instruct.Q4_1.gguf --out tests/fixtures

writes `processors.npz` and, under `smollm2/`, `logits.npz`, `greedy.json`, `text512.npz`, `chat512.npz`, `beam.json`;
`--only NAME` (repeatable) writes some of them. The model is the GGUF file, dequantized to float32 by transformers;
prompts are given to it as token ids. The committed files were made with Python 3.11, torch 2.13.0 (CPU, 2 threads),
transformers 5.22.2, gguf 0.19.0, tokenizers 0.23.3 and numpy 2.4.6. Another machine or version reproduces ids exactly
and numbers to rounding. What each file holds, and how far it can be trusted, is in `tests/fixtures/smollm2/README.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fixture_beam import beam_fixture
from fixture_json import write_json
from fixture_texts import CHAT_TEXT, GREEDY_PROMPTS, LOGIT_PROMPTS, PROSE_TEXT
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

GREEDY_STEPS = 64
TEXT_TOKENS = 512
TOP = 64


def load_model(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def load_tokenizer(path: Path) -> Tokenizer:
    """The file's own vocabulary and merges; transformers' conversion splits some digits and spaces differently."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def forward(model: Any, ids: list[int]) -> np.ndarray:
    """Logits for every position, `[len(ids), vocab]`."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


def top(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest of each row, largest first, the lower id first among equals."""
    return np.argsort(-logits, axis=-1, kind="stable")[:, :count]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def logits_fixture(model: Any, tokenizer: Tokenizer, path: Path) -> None:
    arrays: dict[str, np.ndarray] = {}
    for name, text in LOGIT_PROMPTS.items():
        ids = tokenizer.encode(text).ids
        logits = forward(model, ids)
        best = top(logits, 8)
        arrays[f"{name}.ids"] = np.array(ids, np.int32)
        arrays[f"{name}.last"] = logits[-1]
        arrays[f"{name}.top_ids"] = best.astype(np.int32)
        arrays[f"{name}.top_logits"] = np.take_along_axis(logits, best, axis=-1)
    np.savez_compressed(path, **arrays)


def greedy(model: Any, ids: list[int], steps: int) -> tuple[list[int], list[float]]:
    """Greedy ids past any end token, with the top logit's lead over the second at each step."""
    chosen: list[int] = []
    margins: list[float] = []
    cache = None
    step_input = torch.tensor([ids])
    with torch.inference_mode():
        for _ in range(steps):
            output = model(step_input, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits = output.logits[0, -1]
            (first, second), _ = torch.topk(logits, 2)
            chosen.append(int(torch.argmax(logits)))
            margins.append(float(first - second))
            step_input = torch.tensor([[chosen[-1]]])
    return chosen, margins


def greedy_fixture(model: Any, tokenizer: Tokenizer, path: Path) -> None:
    eos = model.generation_config.eos_token_id
    cases = []
    for name, text in GREEDY_PROMPTS.items():
        ids = tokenizer.encode(text).ids
        chosen, margins = greedy(model, ids, GREEDY_STEPS)
        cases.append(
            {
                "name": name,
                "text": text,
                "prompt_ids": ids,
                "ids": chosen,
                "margins": [round(margin, 5) for margin in margins],
                "min_margin": round(min(margins), 5),
                "eos_at": chosen.index(eos) if eos in chosen else None,
                "output": tokenizer.decode(chosen, skip_special_tokens=False),
            }
        )
        print(f"greedy {name}: smallest margin {min(margins):.3f}")
    write_json(path, {"eos_token_id": eos, "stops_at_eos": False, "cases": cases})


def text_fixture(model: Any, tokenizer: Tokenizer, path: Path) -> None:
    text = {"text512": PROSE_TEXT, "chat512": CHAT_TEXT}[path.stem]
    ids = tokenizer.encode(text).ids[:TEXT_TOKENS]
    if len(ids) < TEXT_TOKENS:
        raise ValueError(f"the text has {len(ids)} tokens; {TEXT_TOKENS} are needed")
    logprobs = log_softmax(forward(model, ids))
    best = top(logprobs, TOP)
    best_logprobs = np.take_along_axis(logprobs, best, axis=-1)
    outside = np.ones(logprobs.shape, dtype=bool)
    np.put_along_axis(outside, best, False, axis=-1)
    rest = np.where(outside, np.exp(logprobs), 0.0).sum(axis=-1)
    nll = -np.take_along_axis(logprobs[:-1], np.array(ids[1:])[:, None], axis=-1)[:, 0]
    print(
        f"{path.stem}: mean nll {nll.mean():.5f}, perplexity {np.exp(nll.mean()):.4f}, mean rest mass {rest.mean():.4f}"
    )
    np.savez_compressed(
        path,
        ids=np.array(ids, np.int32),
        top_ids=best.astype(np.int32),
        top_logprobs=best_logprobs.astype(np.float32),
        rest_logprob=np.log(rest).astype(np.float32),
        nll=nll.astype(np.float32),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the SmolLM2-135M-Instruct.Q4_1 GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="the fixtures directory")
    names = ("logits", "greedy", "text512", "chat512", "beam", "processors")
    parser.add_argument("--only", action="append", choices=names, help="write this one (repeatable); default: all")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wanted = options.only or names
    folder = options.out / "smollm2"
    folder.mkdir(parents=True, exist_ok=True)
    if "processors" in wanted:
        from fixture_processors import processors_fixture

        processors_fixture(options.out / "processors.npz")
    makers: dict[str, Callable[[Any, Tokenizer, Path], None]] = {
        "logits.npz": logits_fixture,
        "greedy.json": greedy_fixture,
        "text512.npz": text_fixture,
        "chat512.npz": text_fixture,
        "beam.json": beam_fixture,
    }
    chosen = {file: maker for file, maker in makers.items() if file.split(".")[0] in wanted}
    if chosen:
        model, tokenizer = load_model(options.model), load_tokenizer(options.model)
        for file, maker in chosen.items():
            maker(model, tokenizer, folder / file)
            print(f"{folder / file}: {(folder / file).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

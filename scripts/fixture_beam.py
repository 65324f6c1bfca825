"""Beam search by transformers on a few prompts, every width with every length penalty and every early_stopping."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import torch
from fixture_json import write_json
from fixture_texts import BEAM_PROMPTS
from tokenizers import Tokenizer
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

WIDTHS = (2, 3, 5)
LENGTH_PENALTIES = (0.6, 1.0, 1.4)
EARLY_STOPPING = (False, True, "never")
MAX_NEW_TOKENS = 24

Layers = list[tuple[torch.Tensor, torch.Tensor]]


class Remembered:
    """A model's forward that computes each prefix once: settings that differ in penalties alone walk the same beams."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.compute = model.forward
        self.known: dict[tuple[int, ...], tuple[torch.Tensor, Layers]] = {}
        model.forward = self.forward

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **_: Any) -> CausalLMOutputWithPast:
        prefixes = [tuple(row) for row in input_ids.tolist()]
        self.learn([prefix for prefix in dict.fromkeys(prefixes) if prefix not in self.known])
        return CausalLMOutputWithPast(logits=torch.stack([self.known[prefix][0] for prefix in prefixes]))

    def learn(self, prefixes: list[tuple[int, ...]]) -> None:
        """Prefixes of one length: each is its parent and one token, or a whole prompt."""
        if not prefixes:
            return
        cache = DynamicCache()
        tokens = torch.tensor(prefixes)
        if all(prefix[:-1] in self.known for prefix in prefixes):
            parents = [self.known[prefix[:-1]][1] for prefix in prefixes]
            for layer, rows in enumerate(zip(*parents, strict=True)):
                cache.update(torch.cat([key for key, _ in rows]), torch.cat([value for _, value in rows]), layer)
            tokens = tokens[:, -1:]
        logits = self.compute(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        for i, prefix in enumerate(prefixes):
            layers = [(layer.keys[i : i + 1].clone(), layer.values[i : i + 1].clone()) for layer in cache.layers]
            self.known[prefix] = (logits[i], layers)


def beam(model: Any, ids: list[int], eos: list[int], **options: Any) -> tuple[list[list[int]], list[float]]:
    """The n best continuations (cut after their end token) and their scores, best first."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            use_cache=False,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=eos,
            pad_token_id=eos[0],
            return_dict_in_generate=True,
            output_scores=True,
            num_return_sequences=options["num_beams"],
            **options,
        )
    sequences = []
    for row in output.sequences[:, len(ids) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        sequences.append(row[:end])
    return sequences, [float(score) for score in output.sequences_scores]


def beam_fixture(model: Any, tokenizer: Tokenizer, path: Path) -> None:
    """Each case is searched in float32 and again in float64; where ids differ a near tie decided: not `clear`."""
    wide = copy.deepcopy(model).double()
    memories = [Remembered(model), Remembered(wide)]
    eos = [model.generation_config.eos_token_id]
    prompts = {name: tokenizer.encode(text).ids for name, text in BEAM_PROMPTS.items()}
    settings = list(itertools.product(prompts, WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING, [eos]))
    # Two end tokens widen transformers' candidate list from 2 x width to 3 x width.
    settings += list(itertools.product(prompts, (3,), (1.0,), (False,), [[*eos, 0]]))
    cases = []
    for name, width, penalty, early, ends in settings:
        options = {"num_beams": width, "length_penalty": penalty, "early_stopping": early}
        ids, scores = beam(model, prompts[name], ends, **options)
        wide_ids, wide_scores = beam(wide, prompts[name], ends, **options)
        clear = ids == wide_ids
        gap = max(abs(a - b) for a, b in zip(scores, wide_scores, strict=True))
        print(f"beam {name} {options}: clear {clear}, scores differ from float64 by {gap:.1e}", flush=True)
        cases.append({"prompt": name, **options, "eos_token_ids": ends, "clear": clear, "scores": scores, "ids": ids})
    for memory in memories:
        memory.model.forward = memory.compute
    write_json(path, {"max_new_tokens": MAX_NEW_TOKENS, "prompts": prompts, "texts": BEAM_PROMPTS, "cases": cases})

"""Beam search by transformers over small tables of logits: wide beams, many ends, no weights.

python scripts/fixture_beam_table.py tests/fixtures/beam_table.json
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from fixture_json import write_json
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.fixtures.beam_table import MAX_NEW_TOKENS, START, VOCAB, logits

SEEDS = (1, 2, 3)
WIDTHS = (2, 6)
LENGTH_PENALTIES = (0.0, 1.0, 1.7)
EARLY_STOPPING = (False, True, "never")
ENDS = ([0], [0, 5, 7])


def table_model(seed: int) -> Any:
    """A transformers model whose forward looks its logits up."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = LlamaForCausalLM(config)

    def forward(input_ids: torch.Tensor, **_: Any) -> CausalLMOutputWithPast:
        rows = [[logits(seed, len(ids) - 1, ids[-1])] for ids in input_ids.tolist()]
        return CausalLMOutputWithPast(logits=torch.tensor(rows))

    model.forward = forward
    return model


def search(model: Any, ends: list[int], **options: Any) -> tuple[list[list[int]], list[float]]:
    output = model.generate(
        torch.tensor([[START]]),
        do_sample=False,
        use_cache=False,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=ends,
        pad_token_id=ends[0],
        return_dict_in_generate=True,
        output_scores=True,
        num_return_sequences=options["num_beams"],
        **options,
    )
    found = []
    for row in output.sequences[:, 1:].tolist():
        end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        found.append(row[:end])
    return found, [float(score) for score in output.sequences_scores]


def main() -> None:
    cases = []
    for seed in SEEDS:
        model = table_model(seed)
        for ends, width, penalty, early in itertools.product(ENDS, WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING):
            options = {"num_beams": width, "length_penalty": penalty, "early_stopping": early}
            ids, scores = search(model, ends, **options)
            cases.append({"seed": seed, **options, "eos_token_ids": ends, "scores": scores, "ids": ids})
    for case in cases:
        case["scores"] = [round(score, 5) for score in case["scores"]]
    write_json(Path(sys.argv[1]), {"cases": cases})


if __name__ == "__main__":
    main()

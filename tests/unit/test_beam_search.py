"""The rules of beam search are transformers': the same ids and scores over small tables of logits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.beam_table import MAX_NEW_TOKENS, START, logits
from unspool.params import BeamParams
from unspool.sampling.beam import BeamSearch, Hypothesis

CASES = json.loads((Path(__file__).parent.parent / "fixtures" / "beam_table.json").read_text())["cases"]


def search(case: dict[str, Any]) -> list[Hypothesis]:
    ends = frozenset(case["eos_token_ids"])
    params = BeamParams(case["num_beams"], case["length_penalty"], case["early_stopping"])
    search = BeamSearch(
        params, max_output=MAX_NEW_TOKENS, num_end_ids=len(ends), ends=lambda tokens: tokens[-1] in ends
    )
    while not search.is_done:
        search.advance([continuations(case["seed"], beam.tokens) for beam in search.beams])
    return search.best(params.width)


def continuations(seed: int, tokens: tuple[int, ...]) -> list[tuple[int, float]]:
    row = logits(seed, len(tokens), tokens[-1] if tokens else START)
    total = math.log(sum(math.exp(value) for value in row))
    return [(token, value - total) for token, value in enumerate(row)]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("width", [2, 6])
def test_searches_equal_transformers(width: int, early_stopping: bool | str) -> None:
    cases = [case for case in CASES if (case["num_beams"], case["early_stopping"]) == (width, early_stopping)]
    assert len(cases) == 18
    for case in cases:
        found = search(case)
        assert [list(hypothesis.tokens) for hypothesis in found] == case["ids"], case
        assert [hypothesis.score for hypothesis in found] == pytest.approx(case["scores"], abs=2e-4)

"""The sampling defaults of a model's files: what has an equal here is honoured, everything else is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unspool.errors import ModelError
from unspool.llm import LLM
from unspool.params import SamplingParams
from unspool.weights.generation import (
    generation_from_gguf,
    generation_from_json,
    ignored_of_gguf,
    ignored_of_json,
)

FILE = Path("there/generation_config.json")


def defaults(**values: Any) -> dict[str, Any]:
    return generation_from_json(FILE, values, 100)


def notes(**values: Any) -> tuple[str, ...]:
    return ignored_of_json(FILE, values)


def test_what_has_an_equal_is_honoured() -> None:
    assert defaults(min_new_tokens=3) == {"min_tokens": 3}
    assert defaults(stop_strings="END") == {"stop": ("END",)}
    assert defaults(stop_strings=["a", "b"]) == {"stop": ("a", "b")}
    banned = {"suppress_tokens": [5, 3, 100, -1], "bad_words_ids": [[7], [8, 9], [2]], "eos_token_id": 2}
    assert defaults(**banned) == {"logit_bias": dict.fromkeys((3, 5, 7), -math.inf)}
    greedy = defaults(**banned, do_sample=False, min_new_tokens=1, top_k=5)
    assert greedy == {"logit_bias": dict.fromkeys((3, 5, 7), -math.inf), "min_tokens": 1, "temperature": 0.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon_cutoff", 3e-4),
        ("eta_cutoff", 2e-3),
        ("num_beams", 4),
        ("min_length", 9),
        ("begin_suppress_tokens", [1]),
        ("forced_eos_token_id", 2),
        ("sequence_bias", [[[1], 2.0]]),
        ("guidance_scale", 1.5),
        ("penalty_alpha", 0.6),
        ("encoder_repetition_penalty", 1.1),
    ],
)
def test_what_has_none_is_named(field: str, value: Any) -> None:
    (note,) = notes(**{field: value})
    assert note.startswith(f"generation_config.json: {field}")
    assert note.endswith("is not supported and is ignored")


def test_what_is_off_or_honoured_is_not() -> None:
    off = {"epsilon_cutoff": 0.0, "num_beams": 1, "guidance_scale": None, "sequence_bias": None, "min_length": 0}
    assert notes(**off, max_new_tokens=5, suppress_tokens=[1], bad_words_ids=[[1]], stop_strings="x") == ()
    assert notes(do_sample=False, epsilon_cutoff=0.1) == (), "nothing is drawn"
    assert notes(bad_words_ids=[[1], [2, 3]]) == (
        "generation_config.json: bad_words_ids: 1 of several tokens each are not supported and are ignored",
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"suppress_tokens": 5}, "suppress_tokens: a list of token ids"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens: a list of token ids"),
        ({"bad_words_ids": [5]}, "bad_words_ids: a list of lists"),
        ({"bad_words_ids": [[]]}, "bad_words_ids: a list of lists"),
        ({"stop_strings": [1]}, "stop_strings: a text or a list"),
        ({"min_new_tokens": -1}, "min_new_tokens: -1 is outside"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {message}"):
        defaults(**values)


def test_gguf_keys() -> None:
    def keys(**values: Any) -> dict[str, Any]:
        return {f"general.sampling.{name}": value for name, value in values.items()}

    path = Path("m.gguf")
    found = generation_from_gguf(
        path, keys(xtc_probability=0.5, xtc_threshold=0.2, penalty_repeat=1.1, penalty_last_n=9)
    )
    assert found == {"xtc_probability": 0.5, "xtc_threshold": 0.2, "repetition_penalty": 1.1, "penalty_window": 9}
    assert generation_from_gguf(path, keys(penalty_repeat=1.1, penalty_last_n=0)) == {}
    assert ignored_of_gguf(path, keys(mirostat=0, temp=1.0)) == ()
    assert ignored_of_gguf(path, keys(mirostat=2)) == (
        "m.gguf: general.sampling.mirostat 2 is not supported and is ignored",
    )


def test_answers_carry_defaults_and_notes(tiny: Callable[..., Any]) -> None:
    checkpoint = replace(
        tiny(),
        generation={"min_tokens": 4, "logit_bias": {7: -math.inf}, "stop": ("\x00",), "temperature": 0.0},
        notes=("the file asks for more",),
    )
    with LLM(checkpoint, device="reference", kv_tokens=256) as llm:
        params = llm.generate([5, 6], SamplingParams(max_tokens=5, logit_bias={8: 1.0})).params
        assert params.logit_bias == {7: -math.inf, 8: 1.0}
        assert (params.min_tokens, params.stop) == (4, ("\x00",))
        assert params.origins["min_tokens"] == params.origins["stop"] == "model"
        assert "the file asks for more" in params.warnings
        again = llm.generate([5, 6], params.request()).params
        assert again.logit_bias == params.logit_bias


def test_what_a_tokenizer_assumed_is_told_with_every_answer(tiny: Callable[..., Any]) -> None:
    made = tiny().tokenizer()
    made.notes = ("the rule 'default' was assumed",)
    with LLM(replace(tiny(), tokenizer=lambda: made), device="reference", kv_tokens=256) as llm:
        assert llm.generate([5, 6], SamplingParams(max_tokens=1)).warnings == made.notes


def test_an_end_token_that_the_model_has_no_row_for_ends_nothing(tiny: Callable[..., Any]) -> None:
    made, size = tiny().tokenizer(), tiny().config.vocab_size
    made.eos_ids = frozenset({*made.eos_ids, size + 5})
    with LLM(replace(tiny(), tokenizer=lambda: made), device="reference", kv_tokens=256) as llm:
        assert len(llm.generate([5, 6], SamplingParams(max_tokens=3, min_tokens=3)).token_ids) == 3

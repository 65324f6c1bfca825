"""SamplingParams: what is refused and how it is named; who sets a value; what is warned of."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest

from unspool.errors import ModelError, RequestError
from unspool.params import BeamParams, Constraint, RepetitionDetector, ResolvedParams, SamplingParams
from unspool.params.order import ORDER, PRESETS, STAGES

NAN, INF = math.nan, math.inf

REFUSED: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-0.1, NAN, INF, True, "1", 1e-9, 1e7)],
    *[("top_k", value) for value in (-2, 1.5, True, NAN, 2**64)],
    *[("top_p", value) for value in (0, 0.0, 1.5, -0.1, NAN, False)],
    *[("min_p", value) for value in (-0.1, 1.1, NAN)],
    *[("typical_p", value) for value in (0, 1.1)],
    *[("top_n_sigma", value) for value in (-1, INF)],
    *[("xtc_probability", value) for value in (-0.1, 1.1)],
    *[("xtc_threshold", value) for value in (0, 1.1)],
    *[("repetition_penalty", value) for value in (0, -1, INF)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1)],
    *[("presence_penalty", value) for value in (-2.1, 2.1)],
    *[("penalty_window", value) for value in (0, -2, 1.0)],
    *[("penalty_scope", value) for value in ("prompt", 1)],
    *[("dry_multiplier", value) for value in (-1, NAN)],
    *[("dry_base", value) for value in (0.5,)],
    *[("dry_allowed_length", value) for value in (0,)],
    *[("dry_sequence_breakers", value) for value in ([""], [1], 3)],
    *[("dry_window", value) for value in (0,)],
    *[("no_repeat_ngram", value) for value in (-1,)],
    *[("logit_bias", value) for value in ({-1: 1}, {"a": 1}, {1: NAN}, {1: 101}, {1: INF}, {1: True}, [1], {1.5: 1})],
    *[("allowed_token_ids", value) for value in ([-1], "12", [1.5], [True], 5)],
    *[("stop_token_ids", value) for value in ([-1], "x")],
    *[("stop", value) for value in ("", ["a", ""], [1], 5, ["x"] * 1025)],
    *[("bad_words", value) for value in ("", [""])],
    *[("max_tokens", value) for value in (-1, 1.5, True)],
    *[("min_tokens", value) for value in (-1,)],
    *[("seed", value) for value in (-1, 2**53, 1.0, True)],
    *[("n", value) for value in (0, None, 1025)],
    *[("best_of", value) for value in (0,)],
    *[("logprobs", value) for value in (-1, True)],
    *[("logprobs_stage", value) for value in ("processed",)],
    *[("prompt_logprobs", value) for value in (-1,)],
    *[("deadline_ms", value) for value in (0, -5, NAN)],
    *[("trace", value) for value in (1, None)],
    *[("ignore_eos", value) for value in ("yes",)],
    *[("include_stop_str", value) for value in (0,)],
    *[("priority", value) for value in (0.5, None)],
    *[("cache_salt", value) for value in (5,)],
    *[("constraint", value) for value in ({"kind": "regex"}, "a+")],
    *[("beam", value) for value in (4,)],
    *[("repetition_detector", value) for value in (True, 8)],
    *[("order", value) for value in ("vLLM", ["top_q"], [3], ["top_p", "top_p"], ["top_k", "top_k_ties"], 5)],
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_nonsense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_a_refusal_says_the_value_and_the_range() -> None:
    with pytest.raises(RequestError, match=r"top_p is 1\.5; allowed: above 0 and up to 1"):
        SamplingParams(top_p=1.5)
    with pytest.raises(RequestError, match=r"temperature is -1; allowed: from 1e-06 to 1e\+06, or 0"):
        SamplingParams(temperature=-1)
    with pytest.raises(RequestError, match=r"stop\[1\] is an empty string"):
        SamplingParams(stop=["a", ""])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 3, "beam": BeamParams(2)}, "n"),
        ({"best_of": 3, "beam": BeamParams(4)}, "best_of"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


def test_objects_check_themselves() -> None:
    for make in (
        lambda: BeamParams(0),
        lambda: BeamParams(2, length_penalty=NAN),
        lambda: BeamParams(2, early_stopping="always"),  # type: ignore[arg-type]
        lambda: RepetitionDetector(repeats=1),
        lambda: Constraint("xml"),  # type: ignore[arg-type]
        lambda: Constraint("regex", ""),
        lambda: Constraint("choice", ()),
        lambda: Constraint("json_schema", 3),
    ):
        with pytest.raises(RequestError):
            make()
    assert Constraint("choice", ["a", "b"]).value == ("a", "b")


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)  # type: ignore[call-arg]


def test_normal_forms() -> None:
    params = SamplingParams(stop="x", allowed_token_ids=[3, 1, 3], logit_bias={"7": 2, 5: -INF}, top_k=-1)  # type: ignore[dict-item]
    assert params.stop == ("x",)
    assert params.allowed_token_ids == (1, 3)
    assert params.logit_bias == {5: -INF, 7: 2.0}
    assert params.top_k == 0


def test_numpy_numbers_are_numbers() -> None:
    import numpy as np

    params = SamplingParams(top_p=np.float32(0.5), top_k=np.int64(5), allowed_token_ids=np.arange(3))
    assert (params.top_p, params.top_k, params.allowed_token_ids) == (0.5, 5, (0, 1, 2))
    assert type(params.top_k) is int


def resolve(generation: dict[str, Any] | None = None, vocab_size: int = 100, **fields: Any) -> ResolvedParams:
    return SamplingParams(**fields).resolve(generation or {}, vocab_size=vocab_size, draw_seed=lambda: 42)


def test_nothing_set_is_the_models_own_distribution() -> None:
    params = resolve()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert params.order == ORDER
    assert set(params.origins.values()) == {"default", "drawn"}
    assert (params.seed, params.origins["seed"]) == (42, "drawn")
    assert params.warnings == ()


def test_the_request_outranks_the_model_and_the_model_the_default() -> None:
    model = {"temperature": 0.6, "top_k": 20, "no_repeat_ngram": 3, "max_length": 20, "do_sample": True}
    params = resolve(model, top_k=40)
    assert (params.temperature, params.origins["temperature"]) == (0.6, "model")
    assert (params.top_k, params.origins["top_k"]) == (40, "request")
    assert (params.no_repeat_ngram, params.origins["no_repeat_ngram"]) == (3, "model")
    assert (params.top_p, params.origins["top_p"]) == (1.0, "default")
    assert params.max_tokens is None


def test_do_sample_false_means_greedy_unless_a_temperature_is_given() -> None:
    assert resolve({"do_sample": False}).greedy
    assert resolve({"do_sample": False}).origins["temperature"] == "model"
    assert not resolve({"do_sample": False}, temperature=0.5).greedy


def test_a_models_nonsense_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="generation config: top_p is 3"):
        resolve({"top_p": 3})


def test_an_explicit_off_beats_the_model() -> None:
    params = resolve({"top_k": 20, "repetition_penalty": 1.2}, top_k=0, repetition_penalty=1.0)
    assert (params.top_k, params.repetition_penalty) == (0, 1.0)
    assert params.origins["top_k"] == "request"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [1, 100]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"logprobs": 101}, "logprobs"),
        ({"prompt_logprobs": 101}, "prompt_logprobs"),
        ({"order": ["temperature"], "top_p": 0.9}, "top_p"),
        ({"order": ["top_p"], "constraint": Constraint("regex", "a")}, "constraint"),
        ({"order": ["top_p"], "min_tokens": 3}, "min_tokens"),
    ],
)
def test_what_resolving_refuses(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0, "top_p": 0.9, "xtc_probability": 0.5}, "top_p, xtc_probability can do nothing"),
        ({"temperature": 2.0, "top_p": 0.3}, "flattens"),
        ({"repetition_penalty": 1.5}, "above 1.3"),
        ({"temperature": 0, "n": 3}, "same answer 3 times"),
        ({"top_k": 1}, "leaves one token"),
        ({"logprobs_stage": "final"}, "without logprobs"),
        ({"dry_base": 2.0}, "dry_base does nothing"),
        ({"xtc_threshold": 0.2}, "xtc_threshold does nothing"),
        ({"penalty_window": 64}, "no penalty is on"),
        ({"beam": BeamParams(4), "temperature": 0.5}, "draws nothing"),
    ],
)
def test_combinations_that_cancel_are_warned_of(fields: dict[str, Any], words: str) -> None:
    reported = resolve(**fields).warnings
    assert any(words in line for line in reported), reported


def test_a_models_hidden_top_k_is_told() -> None:
    assert any("from the model" in line for line in resolve({"top_k": 1}).warnings)


def test_an_order_that_leaves_out_the_models_stage_says_so() -> None:
    params = resolve({"top_k": 20}, order=["temperature", "top_p"])
    assert params.warnings == ("the model's top_k 20 does nothing: order has no stage top_k",)


@pytest.mark.parametrize(
    ("name", "window"), [("unspool", -1), ("transformers", -1), ("vllm", -1), ("llama.cpp", 64), ("mlx", 20)]
)
def test_presets_bring_their_penalty_rules(name: str, window: int) -> None:
    params = resolve(order=name)
    assert params.order == PRESETS[name].stages
    assert params.penalty_window == window
    assert resolve(order=name, penalty_window=7, penalty_scope="output", presence_penalty=1).penalty_window == 7


def test_every_preset_holds_every_stage_once() -> None:
    for preset in PRESETS.values():
        assert {*preset.stages} | {"top_k", "top_k_ties"} == set(STAGES)
        assert len(preset.stages) == len(STAGES) - 1


def test_an_answer_can_tell_its_parameters_as_json() -> None:
    def louder(row: Any, state: Any) -> Any:
        return row

    params = resolve(logit_bias={3: -INF}, order=["bias", louder], constraint=None, beam=BeamParams(2))
    reported = json.loads(json.dumps(params.as_dict()))
    assert reported["logit_bias"] == {"value": {"3": "-inf"}, "origin": "request"}
    assert reported["order"]["value"][0] == "bias"
    assert "louder" in reported["order"]["value"][1]
    assert reported["beam"]["value"]["width"] == 2
    assert reported["seed"] == {"value": 42, "origin": "drawn"}


def test_parameters_can_be_sent_to_another_process() -> None:
    params = resolve(logit_bias={3: 1.0}, stop="x", constraint=Constraint("choice", ["a"]))
    assert pickle.loads(pickle.dumps(params)) == params


def test_parameters_import_neither_numpy_nor_torch() -> None:
    code = (
        "import sys; from unspool.params import SamplingParams; SamplingParams(top_p=0.5).resolve({}, vocab_size=9);"
        "sys.exit(bool({'numpy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

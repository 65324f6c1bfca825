"""The tables of flags against what they stand for: nothing forgotten, nothing misread."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from unspool.cli import flags
from unspool.cli.parser import Parser, UsageError
from unspool.config import EngineConfig
from unspool.errors import RequestError
from unspool.params import BeamParams, Constraint, RepetitionDetector, SamplingParams
from unspool.params.registry import PARAMETERS


def parse(*arguments: str) -> SamplingParams:
    parser = Parser("run", "", "")
    flags.add_sampling_flags(parser)
    return flags.sampling_params(flags.sampling_values(parser.parse_args(arguments)))


def test_every_field_of_sampling_params_has_a_flag_or_a_reason() -> None:
    covered = {flag.key.partition(".")[0] for flag in flags.FLAGS}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    without = {parameter.name for parameter in PARAMETERS if parameter.no_flag}
    assert covered | without == fields
    assert not covered & without


def test_every_field_of_beam_params_has_a_flag() -> None:
    covered = {flag.key for flag in flags.FLAGS if flag.key.startswith("beam.")}
    assert covered == {f"beam.{field.name}" for field in dataclasses.fields(BeamParams)}


def test_every_field_of_engine_config_has_a_flag() -> None:
    assert {flag.field for flag in flags.ENGINE_FLAGS} == {field.name for field in dataclasses.fields(EngineConfig)}


def test_no_flags_are_the_defaults() -> None:
    assert parse() == SamplingParams()


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["-n", "7"], "max_tokens", 7),
        (["--min-tokens", "3"], "min_tokens", 3),
        (["--stop", "a", "--stop", r"\n\n"], "stop", ("a", "\n\n")),
        (["--stop-token-ids", "5,2", "--stop-token-ids", "9"], "stop_token_ids", (2, 5, 9)),
        (["--include-stop-str"], "include_stop_str", True),
        (["--ignore-eos"], "ignore_eos", True),
        (["--stop-on-repetition", "16"], "repetition_detector", RepetitionDetector(16)),
        (["--stop-on-repetition", "16,4"], "repetition_detector", RepetitionDetector(16, 4)),
        (["--stop-on-repetition", "16,4,48"], "repetition_detector", RepetitionDetector(16, 4, 48)),
        (["--deadline-ms", "250"], "deadline_ms", 250.0),
        (["--temperature", "0"], "temperature", 0.0),
        (["--top-k", "40"], "top_k", 40),
        (["--top-p", "0.9"], "top_p", 0.9),
        (["--min-p", "0.05"], "min_p", 0.05),
        (["--typical-p", "0.8"], "typical_p", 0.8),
        (["--top-n-sigma", "1.5"], "top_n_sigma", 1.5),
        (["--xtc-probability", "0.5"], "xtc_probability", 0.5),
        (["--xtc-threshold", "0.2"], "xtc_threshold", 0.2),
        (["--order", "llama.cpp"], "order", "llama.cpp"),
        (["--order", "top_k,temperature"], "order", ("top_k", "temperature")),
        (["--repetition-penalty", "1.1"], "repetition_penalty", 1.1),
        (["--frequency-penalty", "-0.5"], "frequency_penalty", -0.5),
        (["--presence-penalty", "0.5"], "presence_penalty", 0.5),
        (["--penalty-window", "-1"], "penalty_window", -1),
        (["--penalty-scope", "output"], "penalty_scope", "output"),
        (["--dry-multiplier", "0.8"], "dry_multiplier", 0.8),
        (["--dry-base", "1.5"], "dry_base", 1.5),
        (["--dry-allowed-length", "4"], "dry_allowed_length", 4),
        (["--dry-sequence-breakers", r"\t"], "dry_sequence_breakers", ("\t",)),
        (["--dry-window", "64"], "dry_window", 64),
        (["--no-repeat-ngram", "3"], "no_repeat_ngram", 3),
        (["--logit-bias", "13=-inf", "--logit-bias", "7=2.5"], "logit_bias", {7: 2.5, 13: -math.inf}),
        (["--allowed-token-ids", "1,2"], "allowed_token_ids", (1, 2)),
        (["--bad-words", "damn"], "bad_words", ("damn",)),
        (["--json-object"], "constraint", Constraint("json_object")),
        (["--json-schema", '{"type": "string"}'], "constraint", Constraint("json_schema", {"type": "string"})),
        (["--regex", r"\d+"], "constraint", Constraint("regex", r"\d+")),
        (["--choice", "yes", "--choice", "no"], "constraint", Constraint("choice", ["yes", "no"])),
        (["--seed", "9007199254740991"], "seed", 2**53 - 1),
        (["--answers", "3"], "n", 3),
        (["--best-of", "4"], "best_of", 4),
        (["--beam", "4", "--length-penalty", "0.5", "--early-stopping", "yes"], "beam", BeamParams(4, 0.5, True)),
        (["--logprobs", "5"], "logprobs", 5),
        (["--logprobs-stage", "final"], "logprobs_stage", "final"),
        (["--prompt-logprobs", "0"], "prompt_logprobs", 0),
    ],
)
def test_a_flag_sets_its_field(arguments: list[str], field: str, value: Any) -> None:
    params = parse(*arguments)
    assert getattr(params, field) == value
    others = {name for name in SamplingParams.__dataclass_fields__ if name != field}
    assert all(getattr(params, name) == getattr(SamplingParams(), name) for name in others)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(r"\n", "\n"), (r"a\tb", "a\tb"), (r"\\n", r"\n"), (r"\x41\u00e9", "Aé"), (r"\r\0", "\r\0"), ("plain", "plain")],
)
def test_escapes(typed: str, meant: str) -> None:
    assert flags.text(typed) == meant


@pytest.mark.parametrize("typed", [r"\q", "end\\", r"\x4", r"\u12"])
def test_what_is_no_escape_is_refused(typed: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no escape"):
        flags.text(typed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-k", "many"], "--top-k: 'many' is not a whole number"),
        (["--temperature", "hot"], "--temperature: 'hot' is not a number"),
        (["--logit-bias", "13"], "'13' is not ID=VALUE"),
        (["--logit-bias", "a=1"], "'a=1' is not ID=VALUE"),
        (["--stop-token-ids", "1;2"], "'1;2' is not a list of token ids"),
        (["--stop-on-repetition", "x"], "'x' is not PERIOD"),
        (["--json-schema", "{"], "the text given is not JSON"),
        (["--json-schema", "./nowhere.json"], "./nowhere.json cannot be read: No such file"),
        (["--grammar", "./nowhere.lark"], "./nowhere.lark cannot be read"),
        (["--length-penalty", "2"], "a beam search needs its width"),
        (["--json-object", "--regex", "a"], "--json-object and --regex are both given"),
        (["--beam", "2", "--early-stopping", "x"], "'x' is none of yes, no, never"),
        (["--top", "3"], "--top is not an option"),
        (["--seed", "1", "--seed", "2"], "--seed: given twice; it takes one value"),
        (["-n", "1", "--max-tokens", "1"], "-n/--max-tokens: given twice"),
    ],
)
def test_nonsense_is_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*arguments)
    assert message in str(caught.value)


def test_values_are_checked_by_sampling_params() -> None:
    with pytest.raises(RequestError, match=r"top_p is 1\.5"):
        parse("--top-p", "1.5")


def test_files_for_constraints(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    (tmp_path / "grammar.lark").write_text('start: "yes"')
    (tmp_path / "bad.json").write_text("{")
    schema = Constraint("json_schema", {"type": "integer"})
    assert parse("--json-schema", str(tmp_path / "schema.json")).constraint == schema
    assert parse("--grammar", str(tmp_path / "grammar.lark")).constraint == Constraint("grammar", 'start: "yes"')
    with pytest.raises(UsageError, match=r"bad\.json is not JSON"):
        parse("--json-schema", str(tmp_path / "bad.json"))


@pytest.mark.parametrize("name", ["top_p", "top-p", "--top-p"])
def test_a_flag_is_found_by_any_of_its_names(name: str) -> None:
    found = flags.find(name)
    assert found is not None
    assert found.key == "top_p"
    assert flags.find("topp") is None


def test_engine_options() -> None:
    parser = Parser("serve", "", "")
    flags.add_engine_flags(parser, serving=True)
    given = parser.parse_args(["--device", "cpu", "--threads", "3", "--no-prefix-cache", "--max-running", "8"])
    assert flags.engine_options(given) == {"device": "cpu", "threads": 3, "prefix_cache": False, "max_running": 8}
    with pytest.raises(UsageError, match="--isa is 'sse'; allowed: auto, avx512, avx2, plain"):
        flags.engine_options(parser.parse_args(["--isa", "sse"]))

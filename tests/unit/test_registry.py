"""The registry of parameters: what is written from it is current, and one entry is enough everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unspool.params import generate
from unspool.params.registry import GROUPS, PARAMETERS

ROOT = Path(__file__).parents[2]

ONE_MORE = '''
import argparse, sys, types
from pathlib import Path
import numpy as np

# The package without its contents, so that the registry can grow before anything reads it.
import unspool
package = types.ModuleType("unspool.params")
package.__path__ = [str(Path(path) / "params") for path in unspool.__path__]
sys.modules["unspool.params"] = package
from unspool.params import registry
from unspool.params.kinds import Number

def flattened(row, share):
    return np.where(np.isfinite(row), row * np.float32(1 - share), row).astype(np.float32)

new = registry.Parameter(
    name="flatness", kind=Number(0, 1), group=registry.DRAW, default=0.0, metavar="F", hf_key="flat_rate",
    stages=(registry.StageSpec("flatten", shapes_draw=True, function=flattened),), help="Flattens the distribution.",
)
registry.PARAMETERS = (*registry.PARAMETERS, new)
registry.BY_NAME["flatness"] = new
from unspool.params import generate
declared = sys.modules["unspool.params.declared"] = types.ModuleType("unspool.params.declared")
exec(generate.declarations(), declared.__dict__)
del sys.modules["unspool.params"]

from unspool.errors import RequestError
from unspool.params import SamplingParams
from unspool.params.order import PRESETS
from unspool.sampling.pipeline import Sampler

def refused(make, *words):
    try:
        make()
    except RequestError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("taken")

# SamplingParams and checks
assert SamplingParams().flatness is None
assert SamplingParams(flatness=1).flatness == 1.0
refused(lambda: SamplingParams(flatness=2), "flatness is 2", "from 0 to 1")
assert "flatness" in declared.SamplingOptions.__annotations__
# values in force
resolve = lambda generation={}, **fields: SamplingParams(**fields).resolve(generation, vocab_size=50)
assert (resolve().flatness, resolve().origins["flatness"]) == (0.0, "default")
from unspool.weights.generation import generation_from_json
model = generation_from_json(Path("generation_config.json"), {"flat_rate": 0.5}, 50)
assert (resolve(model).flatness, resolve(model).origins["flatness"]) == (0.5, "model")
assert resolve(model, flatness=0.25).flatness == 0.25
refused(lambda: resolve(flatness=0.5, order=["top_p"]), "order has no stage flatten")
# sampling: a stage of every preset, in numpy, traced; absent when off and at temperature 0
assert all("flatten" in preset.stages for preset in PRESETS.values())
row = np.random.default_rng(0).normal(size=50).astype(np.float32) * 9
def choose(**fields):
    sampler = Sampler(resolve(seed=3, **fields), prompt_ids=[1], vocab_size=50, end_ids=frozenset())
    return [sampler.choose(row, position) for position in range(100)]
tokens = lambda **fields: [choice.token for choice in choose(**fields)]
assert len(set(tokens(flatness=1.0))) > 2 * len(set(tokens()))
assert tokens(flatness=0.0) == tokens()
assert tokens(flatness=1.0, temperature=0) == tokens(temperature=0)
assert choose(flatness=0.5, trace=True)[0].trace.stages[-1].name == "flatten"
# the command line
from unspool.cli import flags
parser = argparse.ArgumentParser()
flags.add_sampling_flags(parser)
assert flags.sampling_params(flags.sampling_values(parser.parse_args(["--flatness", "0.5"]))).flatness == 0.5
assert "flattens the distribution" in parser.format_help()
# the server, its published schema and the documents
from unspool.server import schema
from unspool.server.dialect import sampling_params
from unspool.server.fieldtable import tables
from unspool.server.kinds import Checker
from unspool.server.openapi import document
for body in (schema.CHAT, schema.COMPLETIONS, schema.RESPONSES, schema.MESSAGES):
    assert "flatness" in body["properties"]
Checker().check(schema.COMPLETIONS, {"prompt": "x", "flatness": 0.5})
refused(lambda: Checker().check(schema.COMPLETIONS, {"prompt": "x", "flatness": 2}), "flatness is 2")
assert sampling_params({"flatness": 0.5}).flatness == 0.5
posted = document()["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
assert posted["properties"]["flatness"]["maximum"] == 1
assert "| `flatness` |" in tables()
assert "| `flatness` | 0 | 0 … 1 | Flattens the distribution. |" in generate.table(registry.DRAW)
'''


def test_one_entry_is_enough() -> None:
    done = subprocess.run([sys.executable, "-c", ONE_MORE], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_declared_fields_are_those_of_the_registry() -> None:
    declared = (ROOT / "src/unspool/params/declared.py").read_text("utf-8")
    assert declared == generate.declarations(), "run: python -m unspool.params.generate ."


def test_the_documents_have_the_tables_of_the_registry() -> None:
    text = (ROOT / "docs/sampling.md").read_text("utf-8")
    assert text == generate.with_tables(text), "run: python -m unspool.params.generate ."
    for group in GROUPS:
        assert generate.table(group) in text


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_an_entry_makes_sense(parameter: generate.Parameter) -> None:
    assert parameter.group in GROUPS
    assert parameter.help.endswith(".")
    assert parameter.default is None or not parameter.derived
    if parameter.default is not None:
        assert parameter.kind.check(parameter.name, parameter.default) == parameter.default

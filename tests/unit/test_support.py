"""The table of families: every family is in it, and the documents and the command line show it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from unspool.cli import main
from unspool.models.registry import FAMILIES, GGUF, HUGGING_FACE
from unspool.models.support import MODELS, supported
from unspool.models.wrappers import TEXT_FAMILIES

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def script() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import support_table
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return support_table


def test_every_family_and_every_name_is_there() -> None:
    assert set(MODELS) == set(FAMILIES)
    assert {name for each in supported() for name in each.classes} == {*HUGGING_FACE, *TEXT_FAMILIES}
    assert {name for each in supported() for name in each.gguf} == set(GGUF)


def test_the_documents_have_the_table(script: ModuleType) -> None:
    """docs/models.md holds what `python scripts/support_table.py` prints."""
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    before, after = script.MARKS
    assert text.partition(before)[2].partition(after)[0] == script.table()


def test_every_family_is_compared_with_transformers(script: ModuleType) -> None:
    assert set(script.families_of_fixtures().values()) == set(FAMILIES)


def test_llama_cpp_agrees_on_every_model_that_gguf_can_say() -> None:
    from tests.models.family_files import IN_GGUF

    results = json.loads((ROOT / "tests" / "fixtures" / "llama_cpp.json").read_text("utf-8"))
    assert set(results) == set(IN_GGUF)
    assert all(each["greedy"] and each["difference"] < 1e-3 for each in results.values())


def test_files_of_the_converter_were_read() -> None:
    """Of every model that GGUF can say; what the converter leaves out is told."""
    from tests.models.family_files import IN_GGUF, NAMES

    results = json.loads((ROOT / "tests" / "fixtures" / "converter.json").read_text("utf-8"))
    assert set(results) >= set(NAMES)
    assert all(results[name]["difference"] < (3e-4 if name == "phi3-long" else 1e-4) for name in IN_GGUF)
    assert not any("refused_here" in each for each in results.values())


def test_the_command_line_lists_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--supported"]) == 0
    shown = capsys.readouterr().out
    assert all(each.models in shown for each in supported())
    assert main(["models", "--supported", "--json"]) == 0
    assert [each["family"] for each in json.loads(capsys.readouterr().out)] == sorted(FAMILIES)

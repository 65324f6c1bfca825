"""The public surface is what __all__ says, importing it is cheap, and the control plane stays plain Python."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import unspool

# What must not be imported just because someone asked for a name; each is paid for where it is used.
HEAVY = ("torch", "triton", "numpy", "tokenizers", "jinja2", "safetensors", "huggingface_hub", "llguidance", "rich")
CONTROL_PLANE = (
    "unspool.params",
    "unspool.config",
    "unspool.errors",
    "unspool.events",
    "unspool.results",
    "unspool.text.tokenizer",
    "unspool.text.detokenizer",
    "unspool.text.stop",
    "unspool.text.assembler",
    "unspool.chat.template",
    "unspool.chat.messages",
    "unspool.chat.model_chat",
    "unspool.chat.answers",
    "unspool.plan",
    "unspool.engine.request",
    "unspool.engine.scheduler",
    "unspool.cache.blocks",
    "unspool.params.order",
    "unspool.params.resolve",
    "unspool.cli",
    "unspool.cli.flags",
    "unspool.cli.terminal",
)


def imported_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_all_names_exist_and_are_listed() -> None:
    assert len(set(unspool.__all__)) == len(unspool.__all__)
    for name in unspool.__all__:
        assert getattr(unspool, name) is not None
    assert set(unspool.__all__) <= set(dir(unspool))
    assert unspool.__version__


def test_nothing_else_is_public() -> None:
    """Every name with a home is in __all__, and the type checker's imports name the same ones."""
    from unspool import _HOME_OF

    assert set(_HOME_OF) == set(unspool.__all__)
    for name, home in _HOME_OF.items():
        value = getattr(unspool, name)
        assert getattr(value, "__module__", home) in (home, "types", "typing"), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Sequencer'"):
        unspool.Sequencer  # noqa: B018


def test_import_is_cheap() -> None:
    assert not imported_by("import unspool") & set(HEAVY)


@pytest.mark.parametrize("module", CONTROL_PLANE)
def test_control_plane_is_plain_python(module: str) -> None:
    assert not imported_by(f"import {module}") & {"numpy", "torch", "tokenizers"}


def test_a_model_needs_neither_torch_nor_numpy() -> None:
    assert not imported_by("import unspool.llm") & set(HEAVY)


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_version_and_help_need_no_parser(argument: str) -> None:
    assert not imported_by(f"from unspool.cli import main; main([{argument!r}])") & {"argparse", *HEAVY}

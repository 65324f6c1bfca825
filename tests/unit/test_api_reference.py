"""docs/api.md says what the docstrings say, and the examples in them give what they show."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import doctest
import inspect
import sys
from pathlib import Path

import pytest

import unspool
from unspool import LLM, AsyncLLM

ROOT = Path(__file__).parent.parent.parent
CLASSES = [name for name in unspool.__all__ if inspect.isclass(getattr(unspool, name))]


@contextlib.contextmanager
def scripts_importable():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_the_document_is_made_from_the_docstrings() -> None:
    with scripts_importable():
        from api_reference import reference
    assert (ROOT / "docs" / "api.md").read_text("utf-8") == reference(), "python scripts/api_reference.py docs/api.md"


@pytest.mark.parametrize("name", CLASSES)
def test_everything_public_says_what_it_does(name: str) -> None:
    with scripts_importable():
        from api_reference import doc_of, methods
    cls = getattr(unspool, name)
    assert doc_of(cls), name
    for method in methods(cls):
        assert doc_of(getattr(cls, method)), f"{name}.{method}"


def test_every_method_of_llm_has_an_example() -> None:
    with scripts_importable():
        from api_reference import methods
    assert [name for name in methods(LLM) if ">>>" not in (getattr(LLM, name).__doc__ or "")] == []


def test_examples_give_what_they_show(smollm2_path: Path, tmp_path: Path) -> None:
    class Same(LLM):
        """The default model, whichever file the tests were given for it."""

        def __init__(self) -> None:
            super().__init__(str(smollm2_path))

    class AsyncSame(AsyncLLM):
        def __init__(self) -> None:
            super().__init__(str(smollm2_path))

    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    with Same() as llm:
        known = {name: getattr(unspool, name) for name in unspool.__all__}
        known |= {"unspool": unspool, "asyncio": asyncio, "dataclasses": dataclasses}
        known |= {"LLM": Same, "AsyncLLM": AsyncSame, "folder": tmp_path}
        for name in CLASSES:
            for test in finder.find(getattr(unspool, name), name, globs=known):
                test.globs["llm"] = llm  # an example may have made one of its own
                runner.run(test)
    assert runner.tries > 30
    assert runner.failures == 0

"""What the documents show works as it stands: Python that can be pasted, links that lead somewhere."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)")


def defined(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_can_be_pasted(path: Path) -> None:
    """Each name of a block comes from it or from an earlier one of the same document."""
    known = set(dir(builtins))
    for block in BLOCK.findall(path.read_text("utf-8")):
        if block.startswith(">>>"):  # shows what is printed
            continue
        tree = ast.parse(block)
        known |= defined(tree)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert used <= known, f"{used - known} in:\n{block}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    for target in LINK.findall(path.read_text("utf-8")):
        assert target.startswith(("http://", "https://", "mailto:")) or (path.parent / target).exists(), target

"""Packages import only downwards: a package sees those below it, never one beside or above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "unspool"
# From the bottom to the top; what stands in one line does not see its neighbours. Imports for type checkers and those
# inside functions count too. The numpy sampling stages are the specification of the GPU's, so they are below `ops`.
LAYERS = (
    ("records",),
    ("errors", "version", "digest", "lazy", "cgroups", "events", "plan", "web", "progress", "suggest"),
    ("isolation", "strict_json", "machine", "quiet", "hardware", "params", "cache"),
    ("user_config", "overrides", "schemas", "notebook", "reporting", "openai_client"),
    ("text", "sampling"),
    ("weights", "drafter"),
    ("config",),
    ("ops",),
    ("models",),
    ("chat", "speculate", "options", "ceilings"),
    ("results",),
    ("engine",),
    ("llm", "planning"),
    ("async_llm",),
    ("server", "doctor", "evaluation", "bench"),
    ("cluster",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def packages() -> list[str]:
    """The packages and modules that are directly in unspool. `unspool` itself names the public ones lazily."""
    found = {path.stem for path in SOURCE.glob("*.py")} | {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    return sorted(found - {"__init__"})


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, package) of each import from unspool in a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are absolute"
            if node.module == "unspool":
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif node.module is not None and node.module.startswith("unspool."):
                yield node.lineno, node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from ((node.lineno, name.split(".")[1]) for name in names if name.startswith("unspool."))


def test_every_package_has_its_layer() -> None:
    assert sorted(LEVEL) == packages()


@pytest.mark.parametrize("package", packages())
def test_a_package_imports_only_from_below(package: str) -> None:
    home = SOURCE / package
    wrong = []
    for path in sorted(home.rglob("*.py")) if home.is_dir() else [home.with_suffix(".py")]:
        for line, other in imports(path):
            if other not in (package, "_native") and LEVEL.get(other, len(LAYERS)) >= LEVEL[package]:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_an_import_from_above_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "import unspool.cli.run\nfrom unspool import llm\n"
        "if TYPE_CHECKING:\n    from unspool.engine.engine import Engine\n"
        "def late():\n    from unspool.server import run\n    import json\n"
    )
    assert sorted(imports(tmp_path / "module.py")) == [(1, "cli"), (2, "llm"), (4, "engine"), (6, "server")]

"""unspool bench: a benchmark is a module of unspool.bench with `main(argv)`; its last line is JSON."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from unspool.cli.parser import Parser, UsageError, our_manners
from unspool.suggest import nearest

DESCRIPTION = "Run a benchmark. The last line it prints is JSON; `unspool bench NAME --help` lists its options."


def main(argv: Sequence[str]) -> int:
    known = benchmarks()
    longest = max(map(len, known))
    listed = "\n".join(f"  {name:<{longest}}  {line}" for name, line in known.items())
    parser = Parser("bench", "NAME [options]", f"{DESCRIPTION}\n\n{listed}")
    parser.add_common()
    if not argv or argv[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    name, *rest = argv
    if name not in known:
        hint = nearest(name, known, f"they are {', '.join(known)}")
        raise UsageError(f"{name!r} is not a benchmark{hint}")
    from importlib import import_module

    with our_manners():
        status: int | None = import_module(f"unspool.bench.{name.replace('-', '_')}").main(rest)
    return status or 0


def benchmarks() -> dict[str, str]:
    """Name -> the first line of its docstring, read without importing it."""
    import unspool.bench

    found = {}
    for path in sorted(Path(unspool.bench.__path__[0]).glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem.replace("_", "-")] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found

"""Print the requirements that pyproject.toml names, one a line, so that make can install them without building.

python scripts/requirements.py build base test dev
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def main(groups: list[str]) -> None:
    project = tomllib.loads(PROJECT.read_text("utf-8"))
    known = project["project"]["optional-dependencies"]
    known |= {"build": project["build-system"]["requires"], "base": project["project"]["dependencies"]}
    for group in groups:
        if group not in known:
            raise SystemExit(f"{PROJECT.name} has no {group!r}; it has {', '.join(known)}")
        print(*known[group], sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

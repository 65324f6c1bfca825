"""The `llm` command, with this server in its file of OpenAI-compatible models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import MODEL, URL, check, run

HOME = Path(tempfile.mkdtemp())
(HOME / "extra-openai-models.yaml").write_text(
    f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  supports_tools: true\n  supports_schema: true\n"
)


def llm(*arguments: str, given: str = "") -> str:
    environment = {**os.environ, "LLM_USER_PATH": str(HOME), "OPENAI_API_KEY": "none"}
    command = [str(Path(sys.executable).parent / "llm"), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


QUESTION = "What is the capital of France?"
SHORT = ("-m", "ours", "-o", "temperature", "0", "-o", "max_tokens", "16")


@check
def models() -> None:
    assert "ours" in llm("models")


@check
def prompt_streamed_and_whole() -> None:
    streamed = llm(*SHORT, QUESTION)
    assert "Paris" in streamed
    assert llm(*SHORT, "--no-stream", QUESTION) == streamed


@check
def system_and_a_pipe() -> None:
    assert llm(*SHORT, "-s", "Be brief.", given=QUESTION)


@check
def conversation() -> None:
    llm(*SHORT, "My name is Bob.")
    assert llm("-c", "-o", "max_tokens", "16", "-o", "temperature", "0", "What is my name?")


@check
def schema() -> None:
    found = llm("-m", "ours", "-o", "temperature", "0", "--schema", "name, age int", "Extract: Bob is 47 years old.")
    assert json.loads(found) == {"name": "Bob", "age": 47}


@check
def usage_is_logged() -> None:
    llm(*SHORT, QUESTION)
    logged = json.loads(llm("logs", "-n", "1", "--json"))
    assert logged[0]["input_tokens"] > 0
    assert logged[0]["output_tokens"] > 0


run("llm")

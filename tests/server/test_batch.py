"""A file of requests: every line answered once, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import TEMPLATE, make_llm
from unspool.cli import main
from unspool.errors import RequestError
from unspool.models.random import SHAPES, write_random_gguf
from unspool.server.batch import Line, Results, read_requests, run_batch
from unspool.server.config import ServerConfig
from unspool.server.service import Service

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/score": {"input": "hello"},
    "/v1/embeddings": {"input": "hello"},
    "/tokenize": {"prompt": "hello"},
}


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def request(id: str, url: str = "/v1/completions", body: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": body or {"prompt": "ab", "max_tokens": 3, "seed": 1}}


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line["response"] for line in lines}
    assert len(found) == len(lines), "a request was answered twice"
    return found


def run(lines: list[Line], output: Path, concurrency: int = 8) -> None:
    async def go() -> None:
        service = Service(make_llm(TEMPLATE), ServerConfig())
        results = Results(output)
        try:
            await run_batch(service, lines, results, concurrency=concurrency)
        finally:
            results.close()
            await service.engine.shutdown()

    asyncio.run(go())


def test_every_kind_of_request(tmp_path: Path) -> None:
    lines = [request(url, url, body) for url, body in BODIES.items()]
    lines += [request("bad", body={"prompt": "a", "wobble": 1}), request("long", body={"prompt": "x" * 3000})]
    write(tmp_path / "in.jsonl", lines)
    run(read_requests(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    found = read(tmp_path / "out.jsonl")
    statuses = {id: response["status_code"] for id, response in found.items()}
    refused = {"bad", "long", "/v1/embeddings"}
    assert statuses == {line["custom_id"]: 400 if line["custom_id"] in refused else 200 for line in lines}
    assert found["bad"]["body"]["error"]["param"] == "wobble"
    assert found["long"]["body"]["error"]["code"] == "context_length_exceeded"


def test_a_torn_line_is_done_again(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [request(str(index)) for index in range(5)])
    lines, output = read_requests(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    run(lines, output)
    whole = output.read_bytes()
    kept = whole.splitlines(keepends=True)
    for cut in (1, len(kept[-1]) // 2, len(kept[-1]) - 1):
        output.write_bytes(b"".join(kept[:3]) + kept[3][:cut])
        run(lines, output)
        assert output.read_bytes().startswith(b"".join(kept[:3]))
        again = read(output)
        assert set(again) == {"0", "1", "2", "3", "4"}
    before = output.read_bytes()
    run(lines, output)
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: the body is not JSON"),
        ('{"custom_id": "a"}', "line 2: method is missing"),
        (json.dumps(request("0")), "line 2: custom_id '0' is that of line 1"),
        (json.dumps(request("a", "/v1/files")), "line 2: url is"),
        (json.dumps(request("a", body={"prompt": "a", "stream": True})), "line 2: a batch does not stream"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_done(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(request("0")) + "\n" + line + "\n")
    with pytest.raises(RequestError, match=r"in\.jsonl, line 2") as refused:
        read_requests(path)
    assert message in str(refused.value)


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(RequestError, match="is no result"):
        Results(path)
    assert path.read_text() == "my notes\n"


def test_killed_again_and_again_it_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """SIGKILL at ever later moments, as in a real process; then to the end."""
    model, output = tmp_path / "tiny.gguf", tmp_path / "out.jsonl"
    write_random_gguf(model, SHAPES["tiny"])
    lines = [request(str(index), body={"prompt": "ab", "max_tokens": 60, "seed": index}) for index in range(150)]
    write(tmp_path / "in.jsonl", lines)
    command = [sys.executable, "-m", "unspool", "batch", str(tmp_path / "in.jsonl"), "-o", str(output), "-q",
               "-m", str(model), "--device", "reference", "--concurrency", "4"]  # fmt: skip
    kept: list[bytes] = []
    for least in (1, 40, 80):
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < least):
            time.sleep(0.002)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=600)
        now = output.read_bytes().splitlines(keepends=True)
        assert now[: len(kept)] == kept, "a result that was there is gone"
        kept = [line for line in now if line.endswith(b"\n")]
    finished = subprocess.run(command, stderr=subprocess.PIPE, timeout=600, check=False)
    assert finished.returncode == 0, finished.stderr
    assert set(read(output)) == {line["custom_id"] for line in lines}
    alone = tmp_path / "alone.jsonl"
    assert (
        subprocess.run(
            [str(alone) if part == str(output) else part for part in command], timeout=600, check=False
        ).returncode
        == 0
    )
    texts = [{id: r["body"]["choices"] for id, r in read(path).items()} for path in (output, alone)]
    assert texts[0] == texts[1]


# The command ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """batch(*arguments) -> (status, stderr), in an empty directory with a tiny model."""
    monkeypatch.chdir(tmp_path)
    write_random_gguf("tiny.gguf", SHAPES["tiny"])

    def run(*arguments: str) -> tuple[int, str]:
        status = main(["batch", *arguments, "-m", "tiny.gguf", "--device", "reference"])
        return status, capsys.readouterr().err

    return run


def test_refusals_are_told_by_the_exit_status_each_time(batch: Any) -> None:
    write(Path("in.jsonl"), [request("good"), request("bad", body={"prompt": "a", "wobble": 1})])
    first, _ = batch("in.jsonl", "-o", "out.jsonl")
    again, said = batch("in.jsonl", "-o", "out.jsonl")
    assert (first, again) == (3, 3)
    assert said == "All 2 requests have a result already, 1 of them a refusal.\n"
    assert batch("in.jsonl", "-o", "out.jsonl", "-q") == (3, "")
    write(Path("in.jsonl"), [request("good"), request("bad", body={"prompt": "a", "wobble": 1}), request("more")])
    assert batch("in.jsonl", "-o", "out.jsonl", "-q") == (3, ""), "what is left is answered; the refusal stays"
    write(Path("in.jsonl"), [request("good"), request("more")])
    assert batch("in.jsonl", "-o", "out.jsonl", "-q") == (0, ""), "of these requests none was refused"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl", "-o", "out.jsonl"], "missing.jsonl cannot be read: No such file or directory"),
        ([".", "-o", "out.jsonl"], ". cannot be read: Is a directory"),
        (["in.jsonl", "-o", "nowhere/out.jsonl"], "nowhere/out.jsonl cannot be written: No such file or directory"),
        (["in.jsonl", "-o", "notes.txt"], "notes.txt, line 1 is no result"),
        (["in.jsonl", "-o", "torn.jsonl"], "torn.jsonl, line 1 is no result (response is missing)"),
        (["in.jsonl", "-o", "in.jsonl"], "REQUESTS and RESULTS are one file"),
    ],
)
def test_files_that_cannot_be_used_are_named(batch: Any, arguments: list[str], message: str) -> None:
    write(Path("in.jsonl"), [request("good")])
    Path("notes.txt").write_text("my notes\n")
    Path("torn.jsonl").write_text('{"custom_id": "good"}\n')
    status, said = batch(*arguments)
    assert (status, said.count("\n")) == (2, 1)
    assert message in said

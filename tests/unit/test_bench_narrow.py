"""Engines kept to AVX2 (bench/narrow.py): what they hear when they ask for the processor, and what is left alone."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import cpu, narrow
from benchmarks.peer import Process
from unspool.errors import BackendError

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("objdump") or not shutil.which("c++"),
    reason="needs an x86-64 processor, objdump and a compiler",
)

# `number` has cpuid's two bytes in it, and is none.
ASKS = """
#include <cpuid.h>
extern "C" void ask(unsigned leaf, unsigned part, unsigned* out) {
    __cpuid_count(leaf, part, out[0], out[1], out[2], out[3]);
}
extern "C" unsigned number() { return 0x00A20F00u; }
extern "C" void stop() { __builtin_trap(); }
"""
LOADS = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
if len(sys.argv) > 2:
    library.stop()
out = (ctypes.c_uint32 * 4)()
heard = []
for leaf, part in ((0, 0), (1, 0), (7, 0), (7, 1), (0x80000001, 0)):
    library.ask(ctypes.c_uint32(leaf), part, out)
    heard.append(list(out))
print(json.dumps({"heard": heard, "number": library.number()}))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands for an engine's environment: a library that asks, and a file that does not matter."""
    home = tmp_path_factory.mktemp("peer")
    (home / "asks.cpp").write_text(ASKS)
    (home / "lib").mkdir()
    library = home / "lib" / "libasks.so"
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", "-o", str(library), str(home / "asks.cpp")], check=True)
    return home


def hear(library: Path, environ: dict[str, str]) -> dict[str, list[list[int]]]:
    with Process([sys.executable, "-c", LOADS, str(library)], {**os.environ, **environ}) as process:
        answer: dict[str, list[list[int]]] = process.answer()
        return answer


def test_a_narrowed_library_hears_of_no_more_than_avx2(home: Path, tmp_path: Path) -> None:
    library = home / "lib" / "libasks.so"
    before = library.read_bytes()
    answers = narrow.narrow(home, [library], tmp_path / "copy")
    copy = tmp_path / "copy" / "lib" / "libasks.so"
    plain, narrowed = hear(library, {}), hear(copy, {"LD_PRELOAD": str(answers)})
    assert plain["number"] == narrowed["number"] == 0xA20F00
    said, heard = plain["heard"], narrowed["heard"]
    said[1][1] = heard[1][1] = 0  # has the number of the core that was asked
    assert [said[i] for i in (0, 1, 4)] == [heard[i] for i in (0, 1, 4)]
    for leaf in (2, 3):
        assert all(more & less == less for more, less in zip(said[leaf], heard[leaf], strict=True))
    avx2, avx512f, avx512vl, vnni = 1 << 5, 1 << 16, 1 << 31, 1 << 11
    assert heard[2][1] & avx2 == said[2][1] & avx2
    assert not heard[2][1] & (avx512f | avx512vl)
    assert not heard[2][2] & vnni
    assert not heard[3][0] & (1 << 4 | 1 << 5)  # AVX-VNNI, bfloat16
    assert library.read_bytes() == before, "the engine's own file was changed"
    assert (tmp_path / "copy" / "asks.cpp").samefile(home / "asks.cpp")


def test_only_instructions_are_found(home: Path) -> None:
    library = home / "lib" / "libasks.so"
    data = library.read_bytes()
    places = narrow.cpuids(library)
    assert [data[place : place + 2] for place in places] == [narrow.CPUID]
    assert data.count(narrow.CPUID) > 1, "the test's other two bytes are gone"


def test_a_fault_of_the_engines_own_still_ends_it(home: Path, tmp_path: Path) -> None:
    answers = narrow.narrow(home, [home / "lib" / "libasks.so"], tmp_path / "copy")
    command = [sys.executable, "-c", LOADS, str(tmp_path / "copy" / "lib" / "libasks.so"), "stop"]
    done = subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(answers)}, timeout=600)
    assert done.returncode == -4  # SIGILL


def test_libraries_are_those_that_were_loaded_and_those_beside_them(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "peer")
    lib = tmp_path / "peer" / "lib"
    shutil.copy(lib / "libasks.so", lib / "libbeside.so.1")
    (lib / "liblink.so").symlink_to("libasks.so")
    (lib / "readme.txt").write_text("")
    waits = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('{}', flush=True); sys.stdin.readline()"
    with Process([sys.executable, "-c", waits, str(lib / "libasks.so")]) as process:
        process.answer()
        assert narrow.libraries(process.pid, tmp_path / "peer") == [lib / "libasks.so", lib / "libbeside.so.1"]


def test_a_missing_tool_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendError, match="objdump, which is not installed"):
        narrow.cpuids(home / "lib" / "libasks.so")


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_text("no library")
    with pytest.raises(BackendError, match=r"objdump.*ended with status 1"):
        narrow.cpuids(tmp_path / "lib.so")


def test_an_engine_is_narrowed_once(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(home, tmp_path / "bench" / "peer")
    (tmp_path / "bench" / "peer" / "bin").mkdir()
    engine = cpu.Engine("peer", tmp_path / "bench" / "peer" / "bin" / "python", "fake", {"threads": 2})
    starts = []

    @contextmanager
    def started(self: cpu.Engine, context: int) -> Iterator[tuple[Process, float, str]]:
        starts.append(context)
        waits = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('{}', flush=True); sys.stdin.readline()"
        library = tmp_path / "bench" / "peer" / "lib" / "libasks.so"
        with Process([sys.executable, "-c", waits, str(library)]) as process:
            process.answer()
            yield process, 0.0, "1"

    monkeypatch.setattr(cpu.Engine, "started", started)
    copy = tmp_path / "bench" / "peer-avx2"
    answers = str(copy / "without_avx512.so")
    for _ in range(2):
        kept = cpu.kept_to_avx2(engine, tmp_path)
        assert kept == replace(engine, python=copy / "bin" / "python", environ={"LD_PRELOAD": answers})
    assert len(starts) == 1
    assert not narrow.cpuids(copy / "lib" / "libasks.so")
    (copy / "narrowed").unlink()  # as if it had been stopped on the way
    assert cpu.kept_to_avx2(engine, tmp_path) == kept
    assert len(starts) == 2

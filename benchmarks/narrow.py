"""Engines kept to AVX2 on a processor that has more, to see what they would do on one that has not.

Most of them ask the processor what it can do and have no option to use less. So an engine's environment is copied,
files being links, but for the libraries that it loads: in these every `cpuid` is replaced by two bytes that no 64-bit
program may execute. A library that is loaded before them (peers/without_avx512.cpp) catches the fault and answers what
the processor says, less what came after AVX2. They ask while they start; nothing is slower while they work.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from unspool.errors import BackendError

CPUID, TRAP = b"\x0f\xa2", b"\x0e\x0e"
ANSWERS = Path(__file__).with_name("peers") / "without_avx512.cpp"
MORE = {"avx512f", "avx_vnni", "amx_tile"}


def has_more_than_avx2() -> bool:
    """Whether there is anything here to do without, as Linux reports it."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return not MORE.isdisjoint(flags.split())


def libraries(pid: int, home: Path) -> list[Path]:
    """The shared objects under a folder that a process has loaded, and those beside them, which it might."""
    lines = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    loaded = {Path(fields[5]) for fields in lines if len(fields) == 6 and "x" in fields[1]}
    folders = {file.parent for file in loaded if file.is_relative_to(home.resolve())}
    files = (file for folder in folders for file in folder.iterdir() if ".so" in file.suffixes)
    return sorted(file for file in files if file.is_file() and not file.is_symlink())


def narrow(home: Path, asking: Iterable[Path], target: Path) -> Path:
    """A copy of an environment in which these libraries of it do not ask the processor. What answers them instead, to
    be loaded before them."""
    home = home.resolve()
    shutil.copytree(home, target, symlinks=True, copy_function=os.link)
    for library in asking:
        places = cpuids(library)
        if places:
            _replace(target / library.relative_to(home), places)
    answers = target / ANSWERS.with_suffix(".so").name
    _run(["c++", "-O2", "-std=c++17", "-shared", "-fPIC", "-o", str(answers), str(ANSWERS)])
    return answers


def cpuids(library: Path) -> list[int]:
    """Where in a shared object's file its `cpuid` instructions are. Their two bytes stand for other things elsewhere,
    so it is taken apart from its beginning."""
    listing = _run(["objdump", "--disassemble", "--no-show-raw-insn", str(library)], wanted=b"\tcpuid")
    return file_offsets(library.read_bytes(), [int(line.partition(b":")[0], 16) for line in listing])


def file_offsets(elf: bytes, addresses: Sequence[int]) -> list[int]:
    """Of addresses in a 64-bit ELF file, by its table of segments."""
    first, (size, count) = struct.unpack_from("<Q", elf, 32)[0], struct.unpack_from("<HH", elf, 54)
    headers = (struct.unpack_from("<IIQQQQ", elf, first + i * size) for i in range(count))
    segments = [(begin, at, length) for kind, _, at, begin, _, length in headers if kind == 1]
    return [
        next(address - begin + at for begin, at, length in segments if begin <= address < begin + length)
        for address in addresses
    ]


def _replace(file: Path, places: Sequence[int]) -> None:
    """In a file of its own, for it is a link to another one's yet."""
    data, mode = bytearray(file.read_bytes()), file.stat().st_mode
    for place in places:
        if data[place : place + 2] != CPUID:
            raise BackendError(f"{file}: no cpuid at byte {place}, where objdump has one")
        data[place : place + 2] = TRAP
    file.unlink()
    file.write_bytes(data)
    file.chmod(mode)


def _run(command: Sequence[str], wanted: bytes | None = None) -> list[bytes]:
    """The lines of a program's output that have `wanted` in them."""
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            lines = [line for line in process.stdout if wanted is not None and wanted in line]
    except FileNotFoundError as error:
        raise BackendError(f"peers are kept to AVX2 with {command[0]}, which is not installed") from error
    if process.returncode:
        raise BackendError(f"{command!r} ended with status {process.returncode}")
    return lines

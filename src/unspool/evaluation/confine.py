"""Confinement of a process to itself, for code that nobody has read: no network, no file written, no other process.

A filter in the kernel (seccomp) allows the system calls that computing in Python needs, and opening files to read.
Every other call fails with EPERM, which Python raises as PermissionError. Limits on memory and time come before it.
Whoever was confined cannot undo it. Only Python's own library is needed here: the child imports nothing else.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass

# Numbers of the allowed system calls.
_CALLS = {
    "x86_64": {
        "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
        "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
        "pread64": 17, "access": 21, "select": 23, "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32,
        "nanosleep": 35, "getpid": 39, "exit": 60, "uname": 63, "fcntl": 72, "getcwd": 79, "readlink": 89,
        "gettimeofday": 96, "getrusage": 98, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107,
        "getegid": 108, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204,
        "getdents64": 217, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231,
        "openat": 257, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "set_robust_list": 273,
        "prlimit64": 302, "getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334, "faccessat2": 439,
    },
    "aarch64": {
        "getcwd": 17, "dup": 23, "fcntl": 25, "faccessat": 48, "openat": 56, "close": 57, "getdents64": 61,
        "lseek": 62, "read": 63, "write": 64, "pread64": 67, "pselect6": 72, "ppoll": 73, "readlinkat": 78,
        "newfstatat": 79, "fstat": 80, "exit": 93, "exit_group": 94, "futex": 98, "set_robust_list": 99,
        "nanosleep": 101, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "sched_getaffinity": 123,
        "sched_yield": 124, "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139,
        "times": 153, "uname": 160, "getrusage": 165, "gettimeofday": 169, "getpid": 172, "getuid": 174,
        "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178, "brk": 214, "munmap": 215, "mremap": 216,
        "mmap": 222, "mprotect": 226, "madvise": 233, "prlimit64": 261, "getrandom": 278, "membarrier": 283,
        "statx": 291, "rseq": 293, "faccessat2": 439,
    },
}  # fmt: skip
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
_WRITES = 0o3 | 0o100 | 0o1000  # of open's flags: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
_LOAD, _EQUAL, _ANY, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: LD|W|ABS, JMP|JEQ|K, JMP|JSET|K, RET|K
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # 1: EPERM
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # prctl


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


@dataclass(frozen=True)
class Limits:
    memory: int  # bytes of address space
    seconds: int  # of processor time


def why_not() -> str | None:
    """Why a process cannot be confined on this system; None: it may be tried."""
    if not sys.platform.startswith("linux"):
        return f"it takes Linux's system call filter, and this is {platform.system()}"
    if platform.machine() not in _CALLS:
        return f"there is no table of system calls for {platform.machine()}"
    return None


def confine(limits: Limits) -> None:
    """Confine this process for the rest of its life. An OSError says why that failed; then nothing may be run."""
    import resource

    for kind, limit, most in (
        (resource.RLIMIT_AS, limits.memory, limits.memory),
        (resource.RLIMIT_CPU, limits.seconds, limits.seconds + 1),  # SIGXCPU, then SIGKILL
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, 32, 32),
    ):
        resource.setrlimit(kind, (limit, most))
    program = _filter(platform.machine())
    libc = ctypes.CDLL(None, use_errno=True)
    array = (_Instruction * len(program))(*program)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs was refused")
    if libc.prctl(_SECCOMP, _FILTER, ctypes.byref(_Program(len(program), array)), 0, 0):
        raise OSError(ctypes.get_errno(), "the system call filter was refused")


def _filter(machine: str) -> list[_Instruction]:
    calls = _CALLS[machine]
    conditional = ("openat", "prlimit64")
    plain = [number for name, number in calls.items() if name not in conditional]
    return [
        _Instruction(_LOAD, 0, 0, _ARCHITECTURE),
        _Instruction(_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        _Instruction(_RETURN, 0, 0, _KILL),
        _Instruction(_LOAD, 0, 0, _NUMBER),
        *_allowed(plain),
        # openat(directory, path, flags): to read alone
        *_if_number(calls["openat"], _Instruction(_LOAD, 0, 0, _ARGUMENTS + 16), _Instruction(_ANY, 1, 0, _WRITES)),
        # prlimit64(pid): of this process alone, 0
        *_if_number(calls["prlimit64"], _Instruction(_LOAD, 0, 0, _ARGUMENTS), _Instruction(_EQUAL, 0, 1, 0)),
        _Instruction(_RETURN, 0, 0, _REFUSE),
    ]


def _allowed(numbers: Iterable[int]) -> list[_Instruction]:
    pairs = ((_Instruction(_EQUAL, 0, 1, number), _Instruction(_RETURN, 0, 0, _ALLOW)) for number in numbers)
    return [instruction for pair in pairs for instruction in pair]


def _if_number(number: int, load: _Instruction, test: _Instruction) -> list[_Instruction]:
    """For one call: load an argument; the test's false branch allows it, or its true one, and the other refuses."""
    return [
        _Instruction(_EQUAL, 0, 4, number),
        load,
        test,
        _Instruction(_RETURN, 0, 0, _ALLOW),
        _Instruction(_RETURN, 0, 0, _REFUSE),
    ]


# The child ----------------------------------------------------------------------------------------------------------
def serve() -> None:
    """The child's whole life: read limits, a token and a program; confine itself; run it; say what came of it.

    The token is written behind a program that ran to its end: to leave early is not to pass.
    """
    import json
    import sysconfig

    order = json.loads(sys.stdin.buffer.read())
    answers, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    library = sysconfig.get_path("stdlib")
    sys.path[:] = [library, os.path.join(library, "lib-dynload")]
    try:
        confine(Limits(order["memory"], order["seconds"]))
    except (OSError, ValueError) as error:
        os.write(answers, f"unconfined {error}".encode())
        os._exit(3)
    os._exit(_run(order["program"], order["token"], answers))


def _run(program: str, token: str, answers: int) -> int:
    try:
        exec(compile(program, "<answer>", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        os.write(answers, f"failed {type(error).__name__}: {error}"[:500].encode("utf-8", "replace"))
        return 1
    os.write(answers, token.encode())
    return 0

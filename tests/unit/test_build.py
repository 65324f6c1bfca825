"""What a build says that cannot begin."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent.parent.parent / "native"


def test_without_a_compiler_the_build_says_what_to_install(tmp_path: Path) -> None:
    tools = {name: shutil.which(name) for name in ("cmake", "ninja")}
    if None in tools.values():
        pytest.skip("cmake or ninja is not here")
    for name, path in tools.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        os.symlink(str(path), tmp_path / "bin" / name)
    done = subprocess.run(
        ["cmake", "-G", "Ninja", "-S", str(NATIVE), "-B", str(tmp_path / "build")],
        env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "no C++ compiler was found. Install one with C++20 (on Debian or Ubuntu: apt install g++;" in said

"""Limits of containers, as both versions of the kernel's interface tell them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unspool import cgroups, machine


class Groups:
    """A file system of control groups."""

    def __init__(self, folder: Path) -> None:
        self.root, self.own = folder / "cgroup", folder / "own"
        self.root.mkdir()

    def put(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    made = Groups(tmp_path)
    monkeypatch.setattr(cgroups, "ROOT", made.root)
    monkeypatch.setattr(cgroups, "OWN", made.own)
    return made


def version_2(groups: Groups, path: str = "/") -> None:
    groups.put("cgroup.controllers", "cpu memory\n")
    groups.own.write_text(f"0::{path}\n")


def test_without_groups_there_are_no_limits(groups: Groups) -> None:
    assert cgroups.cpu_limit() is None
    assert cgroups.memory_left() is None
    groups.own.write_text("torn\n\n0::/")
    assert cgroups.cpu_limit() is None


def test_a_container_sees_its_limits_at_the_root(groups: Groups) -> None:
    version_2(groups)
    groups.put("cpu.max", "250000 100000\n")
    groups.put("memory.max", "1000000\n")
    groups.put("memory.current", "700000\n")
    groups.put("memory.stat", "anon 100000\ninactive_file 300000\nactive_file 200000\n")
    assert cgroups.cpu_limit() == 2.5
    assert cgroups.memory_left() == 800_000


def test_no_limit_is_written_as_max(groups: Groups) -> None:
    version_2(groups)
    groups.put("cpu.max", "max 100000\n")
    groups.put("memory.max", "max\n")
    groups.put("memory.current", "700000\n")
    assert cgroups.cpu_limit() is None
    assert cgroups.memory_left() is None


def test_the_limits_of_groups_above_hold_too(groups: Groups) -> None:
    version_2(groups, "/pods/one")
    groups.put("pods/one/cpu.max", "400000 100000\n")
    groups.put("pods/cpu.max", "300000 100000\n")
    groups.put("pods/one/memory.max", "900\n")
    groups.put("pods/one/memory.current", "100\n")
    groups.put("pods/memory.max", "2000\n")
    groups.put("pods/memory.current", "1500\n")
    assert cgroups.cpu_limit() == 3
    assert cgroups.memory_left() == 500


@pytest.mark.parametrize("path", ["/", "/docker/of-the-host"], ids=["own", "of the host"])
def test_version_1(groups: Groups, path: str) -> None:
    groups.own.write_text(f"3:cpuset:/\n2:cpu,cpuacct:{path}\n1:memory:{path}\n0::/\n")
    groups.put("cpu,cpuacct/cpu.cfs_quota_us", "150000\n")
    groups.put("cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    groups.put("memory/memory.limit_in_bytes", "5000\n")
    groups.put("memory/memory.usage_in_bytes", "4000\n")
    groups.put("memory/memory.stat", "total_inactive_file 500\ntotal_active_file 1000\n")
    assert cgroups.cpu_limit() == 1.5
    assert cgroups.memory_left() == 2500
    groups.put("cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    groups.put("memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert cgroups.cpu_limit() is None
    assert cgroups.memory_left() is None


def test_the_machine_has_no_more_than_the_container(groups: Groups) -> None:
    version_2(groups)
    groups.put("memory.max", "5000\n")
    groups.put("memory.current", "1000\n")
    for quota, cores in (("50000", 1), ("199999", 1), ("max", len(os.sched_getaffinity(0)))):
        groups.put("cpu.max", f"{quota} 100000\n")
        assert machine.num_cores() == cores
    assert machine.free_memory() == 4000

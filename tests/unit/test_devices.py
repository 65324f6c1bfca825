"""Which machines are asked for a GPU, before torch is imported for it."""

from __future__ import annotations

import os

import pytest

from unspool import ops


@pytest.mark.parametrize(
    ("names", "may_have"),
    [
        (["null", "nvidiactl", "nvidia0"], True),
        (["nvhost-gpu"], True),
        (["dxg"], True),
        (["null", "nvram", "nvme0n1"], False),
        ([], False),
    ],
)
def test_a_gpu_is_looked_for_where_its_driver_made_a_device(
    names: list[str], may_have: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops.sys, "platform", "linux")
    monkeypatch.setattr(os, "listdir", lambda path: names)
    assert ops._may_have_gpu() is may_have


def test_the_driver_is_asked_where_devices_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert ops._may_have_gpu() is True
    monkeypatch.setattr(ops.sys, "platform", "win32")
    assert ops._may_have_gpu() is True

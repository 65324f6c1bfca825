"""The attacks: what they send, and how a wait is counted."""

from __future__ import annotations

import json

import pytest

from benchmarks import attacks


def test_bodies_are_what_a_server_takes_in() -> None:
    """Within the largest request, and JSON, or nothing but the first limit would be measured."""
    bodies = [attacks.duplicate_keys(), attacks.nested(), attacks.stops(), attacks.chat(100_000)()]
    for body in bodies:
        assert len(body) <= 8 * 1024 * 1024
        assert isinstance(json.loads(body), dict)


def test_a_question_that_waits_counts_for_those_behind_it() -> None:
    step = attacks.INTERVAL
    assert attacks.waits_of(step / 2) == [step / 2]
    assert attacks.waits_of(3.5 * step) == pytest.approx([3.5 * step, 2.5 * step, 1.5 * step, 0.5 * step])


def test_names_are_unique_and_unknown_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    names = [case.name for case in attacks.CASES]
    assert len(set(names)) == len(names)
    with pytest.raises(SystemExit):
        attacks.main(["--only", "nothing,nowhere"])
    assert "unknown: nowhere" in capsys.readouterr().err

"""The options of an application are checked before anything starts; and how many replicas there should be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.cli.cluster import read_app
from unspool.cluster.app_options import AppOptions
from unspool.cluster.autoscaling import EMPTY, FULL, num_replicas, policy
from unspool.errors import RequestError

pytest.importorskip("yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": "smollm2"}, "unknown option .modle.; did you mean .model."),
        ({"num_replicas": 0}, "num_replicas is 0; allowed: a whole number from 1"),
        ({"num_replicas": True}, "num_replicas is True; allowed: a whole number from 1"),
        ({"silence": -1}, "silence is -1; allowed: a number above 0"),
        ({"target_requests": "many"}, "target_requests is 'many'; allowed: a number above 0"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas is 2; min_replicas is 3, and cannot be more"),
        ({"num_replicas": 2, "max_replicas": 4}, "num_replicas and max_replicas are both given"),
        ({"engine": {"kv_token": 5}}, "kv_token"),
        ({"engine": {"threads": 0}}, "threads"),
        ({"server": {"dran": 5}}, "unknown server option .dran.; did you mean .drain."),
        ({"server": {"api_keys": [" "]}}, "empty"),
    ],
)
def test_wrong_options_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        AppOptions.of(values)


def test_a_file_is_an_application(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"")
    (file := tmp_path / "app.yaml").write_text(
        "model: tiny.gguf\nnum_replicas: 2\nengine: {threads: 2}\nserver: {names: [tiny], api_keys: [k]}\n"
    )
    asked = read_app(file)
    assert asked.model == str(tmp_path / "tiny.gguf"), "as replicas elsewhere find it"
    assert (asked.num_replicas, asked.is_autoscaled) == (2, False)
    assert asked.resources() == {"num_cpus": 2.0}
    assert asked.server_config().names == ("tiny",)
    assert AppOptions.of(dataclasses.asdict(asked)) == asked
    for text, message in (("- a", "must hold options by name"), ("{", "is no YAML")):
        file.write_text(text)
        with pytest.raises(RequestError, match=message):
            read_app(file)


@pytest.mark.parametrize(
    ("requests", "current", "cache_usage", "expected"),
    [
        pytest.param(0, 3, None, 1, id="nothing to do"),
        pytest.param(16, 1, None, 1, id="what one replica is meant for"),
        pytest.param(17, 1, None, 2, id="one more than that"),
        pytest.param(100, 2, None, 7, id="a crowd"),
        pytest.param(4, 2, 0.95, 3, id="full caches: one more"),
        pytest.param(100, 2, 0.95, 7, id="full caches and a crowd"),
        pytest.param(4, 3, 0.7, 3, id="caches more than half full: none goes"),
        pytest.param(4, 3, 0.3, 1, id="caches that have room"),
    ],
)
def test_the_number_of_replicas(requests: float, current: int, cache_usage: float | None, expected: int) -> None:
    assert num_replicas(requests, 16, current, cache_usage) == expected


@given(st.integers(0, 1000), st.integers(0, 50), st.one_of(st.none(), st.floats(0, 1)))
def test_more_requests_or_fuller_caches_never_take_a_replica_away(
    requests: int, current: int, usage: float | None
) -> None:
    wanted = num_replicas(requests, 16, current, usage)
    assert num_replicas(requests + 1, 16, current, usage) >= wanted
    assert wanted >= num_replicas(requests, 16, current, None)
    if usage is not None and current:
        assert num_replicas(requests, 16, current, 1.0) >= wanted
        assert wanted >= current or usage <= EMPTY
        assert wanted > current or usage <= FULL


def test_serves_interface_keeps_the_limits() -> None:
    """The attributes are those of Serve's AutoscalingContext that the policy reads."""

    def context(requests: float, usages: list[float]) -> Any:
        return SimpleNamespace(
            config=SimpleNamespace(target_ongoing_requests=2.0),
            total_num_requests=requests,
            current_num_replicas=2,
            capacity_adjusted_min_replicas=2,
            capacity_adjusted_max_replicas=4,
            aggregated_metrics={"cache_usage": dict(enumerate(usages))} if usages else {},
        )

    assert policy(context(0, []))[0] == 2
    assert policy(context(6, []))[0] == 3
    assert policy(context(1000, []))[0] == 4
    assert policy(context(0, [1.0, 0.9]))[0] == 3

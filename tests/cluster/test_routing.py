"""The routing rule, as a table."""

from __future__ import annotations

import pytest

from unspool.cluster.prefixes import Expected, prompt_chain
from unspool.cluster.routing import ReplicaView, Rule, num_matched, rank

CHAIN = [f"block{n}" for n in range(10)]


def view(name: str, load: int = 0, blocks: int = 0, *, is_draining: bool = False) -> ReplicaView:
    return ReplicaView(name, load, frozenset(CHAIN[:blocks]), is_draining)


@pytest.mark.parametrize(
    ("replicas", "avoid", "expected"),
    [
        pytest.param([view("a", 0, 2), view("b", 0, 7)], (), ["b", "a"], id="the longest prefix"),
        pytest.param([view("a", 0, 2), view("b", 4, 7)], (), ["b", "a"], id="a little more load does not matter"),
        pytest.param([view("a", 0, 2), view("b", 5, 7)], (), ["a", "b"], id="overload does"),
        pytest.param([view("a", 20, 0), view("b", 30, 7)], (), ["b", "a"], id="among the busy the factor decides"),
        pytest.param([view("a", 20, 0), view("b", 31, 7)], (), ["a", "b"], id="beyond the factor"),
        pytest.param([view("a", 3), view("b", 1)], (), ["b", "a"], id="no prefix: the least load"),
        pytest.param([view("a", 0, 3), view("b", 9, 9)], ("a",), ["b"], id="avoided"),
        pytest.param([view("a", 0, 9, is_draining=True), view("b", 9)], (), ["b"], id="draining"),
        pytest.param([view("a")], ("a",), [], id="nobody"),
        pytest.param([], (), [], id="no replicas"),
    ],
)
def test_the_ranking(replicas: list[ReplicaView], avoid: tuple[str, ...], expected: list[str]) -> None:
    assert rank(CHAIN, replicas, avoid=avoid) == expected


def test_a_match_below_the_least_share_does_not_count() -> None:
    replicas = [view("a", 0, 0), view("b", 1, 2)]
    assert rank(CHAIN, replicas, Rule(min_match=0.2))[0] == "b"
    assert rank(CHAIN, replicas, Rule(min_match=0.3))[0] == "a"


def test_without_prefixes_load_alone_decides() -> None:
    assert rank(CHAIN, [view("a", 1, 9), view("b", 0)], Rule(by_prefix=False)) == ["b", "a"]


def test_equal_beginnings_go_to_one_replica_before_any_is_computed() -> None:
    replicas = [view(name) for name in "abcd"]
    chosen = {rank([f"prompt{n}", f"rest{n % 3}"], replicas)[0] for n in range(50)}
    assert chosen == set("abcd"), "different prompts spread over all replicas"
    assert len({rank(["same", f"rest{n}"], replicas)[0] for n in range(50)}) == 1


def test_a_lost_replica_moves_only_its_own_prompts() -> None:
    replicas = [view(name) for name in "abc"]
    for n in range(50):
        before = rank([f"prompt{n}"], replicas)
        after = rank([f"prompt{n}"], replicas, avoid={"b"})
        assert after == [name for name in before if name != "b"]


def test_a_match_ends_at_the_first_missing_block() -> None:
    assert num_matched(CHAIN, {"block0", "block1", "block3"}) == 2


def test_a_prompts_chain_is_that_of_its_whole_blocks() -> None:
    about = {"model": "m", "layout": "l", "salt": None, "block_size": 4}
    chain = prompt_chain(list(range(11)), **about)
    assert len(chain) == 2
    assert prompt_chain(list(range(8)), **about) == chain
    assert prompt_chain(list(range(7)), **about) == chain[:1]
    assert prompt_chain([9, *range(1, 11)], **about)[0] != chain[0]
    assert prompt_chain(list(range(11)), **(about | {"salt": "s"})) != chain


def test_what_was_sent_is_expected_for_a_while() -> None:
    now = 0.0
    expected = Expected(lambda: now)
    expected.add(["a", "b"])
    now = 20.0
    expected.add(["b", "c"])
    assert [key in expected for key in "abcd"] == [True, True, True, False]
    now = 35.0
    assert [key in expected for key in "abc"] == [False, True, True]
    now = 60.0
    assert "b" not in expected

"""The routing rule: as a table, and what holds for whatever replicas there are."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.cluster.prefixes import Expected, prompt_chain
from unspool.cluster.routing import RULE, ReplicaView, Rule, num_matched, overload_limit, rank

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
    rule = Rule(by_prefix=False)
    assert rank(CHAIN, [view("a", 1, 9), view("b", 0)], rule) == ["b", "a"]
    turns = [CHAIN[: n + 1] for n in range(len(CHAIN))]
    assert {rank(turn, [view("a", 0, 9), view("b")], rule)[0] for turn in turns} == {"a", "b"}, "ties go anywhere"


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


# What holds for all ---------------------------------------------------------------------------------------------------
NAMES = [f"replica-{n}" for n in range(6)]
views = st.lists(
    st.builds(
        view,
        st.sampled_from(NAMES),
        st.integers(0, 40),
        st.integers(0, len(CHAIN)),
        is_draining=st.booleans(),
    ),
    unique_by=lambda each: each.name,
    max_size=len(NAMES),
)
rules = st.builds(
    Rule, slack=st.integers(0, 10), imbalance=st.floats(1, 4), min_match=st.floats(0, 1), by_prefix=st.booleans()
)


@given(views, rules, st.sets(st.sampled_from(NAMES)))
def test_the_ranking_is_of_all_that_may_take_the_request(
    replicas: list[ReplicaView], rule: Rule, avoid: set[str]
) -> None:
    able = [each.name for each in replicas if each.name not in avoid and not each.is_draining]
    assert sorted(rank(CHAIN, replicas, rule, avoid)) == sorted(able)


@given(views, rules, st.randoms())
def test_the_order_in_which_replicas_are_known_does_not_matter(
    replicas: list[ReplicaView], rule: Rule, random: Random
) -> None:
    shuffled = list(replicas)
    random.shuffle(shuffled)
    assert rank(CHAIN, shuffled, rule) == rank(CHAIN, replicas, rule)


@given(views, rules)
def test_no_prefix_is_worth_an_overloaded_replica(replicas: list[ReplicaView], rule: Rule) -> None:
    by_name = {each.name: each for each in replicas}
    ranked = [by_name[name] for name in rank(CHAIN, replicas, rule)]
    if ranked:
        limit = overload_limit(min(each.load for each in ranked), rule)
        assert ranked[0].load <= limit
        overloaded = [each.load > limit for each in ranked]
        assert overloaded == sorted(overloaded), "all others come before them"


@given(views, rules)
def test_the_first_has_the_longest_prefix_that_counts_or_else_the_least_load(
    replicas: list[ReplicaView], rule: Rule
) -> None:
    by_name = {each.name: each for each in replicas}
    ranked = [by_name[name] for name in rank(CHAIN, replicas, rule)]
    if not ranked:
        return

    def match(each: ReplicaView) -> int:
        found = num_matched(CHAIN, each.prefixes)
        return found if rule.by_prefix and found >= rule.min_match * len(CHAIN) else 0

    limit = overload_limit(min(each.load for each in ranked), rule)
    able = [each for each in ranked if each.load <= limit]
    longest = max(map(match, able))
    assert match(ranked[0]) == longest
    assert ranked[0].load == min(each.load for each in able if match(each) == longest)


@given(views, rules, st.sampled_from(NAMES))
def test_a_replica_that_goes_leaves_the_order_of_the_others(replicas: list[ReplicaView], rule: Rule, gone: str) -> None:
    """Unless it had the least load, by which the others are measured."""
    able = [each for each in replicas if not each.is_draining]
    left = [each for each in able if each.name != gone]
    if left and min(each.load for each in left) == min(each.load for each in able):
        assert rank(CHAIN, left, rule) == [name for name in rank(CHAIN, able, rule) if name != gone]


@given(views)
def test_a_prompt_without_a_whole_block_goes_to_the_least_load(replicas: list[ReplicaView]) -> None:
    able = {each.name: each.load for each in replicas if not each.is_draining}
    if able:
        assert able[rank([], replicas, RULE)[0]] == min(able.values())

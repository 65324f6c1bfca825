"""A replay passes on what is new, once, and nothing that differs."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import zip_longest

import pytest

from unspool.cluster.replay import Replay
from unspool.errors import ReplayError
from unspool.events import Event, Finished, Text, Timings, Token, Usage
from unspool.results import Receipt

RECEIPT = Receipt("m", "1", "k", 7)
TIMES = Timings(0, 0, 0, 0, None, None)


def end(choice: int, num_tokens: int, reason: str = "stop") -> Finished:
    return Finished("r", choice, reason, Usage(3, num_tokens), TIMES, seed=7)  # type: ignore[arg-type]


def pieces(rng: random.Random, choice: int, text: str, tokens: list[Token]) -> list[Event]:
    """An answer, cut into events at random places."""
    events: list[Event] = []
    while text or tokens:
        characters, count = rng.randint(0, 4), rng.randint(0, 3)
        events.append(Text("r", choice, text[:characters], tuple(tokens[:count])))
        text, tokens = text[characters:], tokens[count:]
    return events


def test_however_an_answer_is_cut_and_lost_it_arrives_once() -> None:
    rng = random.Random(5)
    for _ in range(300):
        answers = [
            (
                "".join(rng.choices("abé", k=rng.randint(0, 30))),
                [Token(rng.randint(0, 9), rng.random()) for _ in range(12)],
            )
            for _ in range(2)
        ]
        replay, got = Replay(2), [["", []], ["", []]]
        while not replay.is_done:
            replay.begin(RECEIPT)
            parts = [
                [*pieces(rng, choice, text, list(tokens)), end(choice, len(tokens))]
                for choice, (text, tokens) in enumerate(answers)
            ]
            in_turns = [event for both in zip_longest(*parts) for event in both if event is not None]
            for event in in_turns[: rng.randint(1, len(in_turns))]:
                fresh = replay.push(event)
                if isinstance(fresh, Text):
                    got[fresh.choice][0] += fresh.text
                    got[fresh.choice][1] += fresh.tokens
        assert got == [[text, tokens] for text, tokens in answers]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Text("r", 0, "aX", (Token(1, -0.5), Token(2, -1.0))), "the text differs after character 0"),
        (Text("r", 0, "ab", (Token(1, -0.5), Token(3, -1.0))), "token 1 was 2 and is 3"),
        (Text("r", 0, "ab", (Token(1, -0.5), Token(2, -1.25))), r"token 1 \(2\) has another logprob"),
        (end(0, 1), "it ended after 0 tokens where 2 were sent"),
    ],
)
def test_a_different_answer_is_refused_by_what_differs(second: Event, message: str) -> None:
    replay = Replay(1)
    replay.begin(RECEIPT)
    replay.push(Text("r", 0, "ab", (Token(1, -0.5), Token(2, -1.0))))
    replay.begin(RECEIPT)
    with pytest.raises(ReplayError, match=message):
        replay.push(second)


def test_another_ending_is_refused() -> None:
    replay = Replay(2)
    replay.begin(RECEIPT)
    replay.push(end(0, 0))
    replay.begin(RECEIPT)
    assert replay.push(end(0, 0)) is None
    replay.begin(RECEIPT)
    with pytest.raises(ReplayError, match="ended with"):
        replay.push(end(0, 0, "length"))


def test_more_after_an_ending_is_refused() -> None:
    replay = Replay(2)
    replay.begin(RECEIPT)
    replay.push(end(0, 0))
    replay.begin(RECEIPT)
    with pytest.raises(ReplayError, match="goes on where it had ended"):
        replay.push(Text("r", 0, "more", ()))


def test_a_receipt_may_change_only_before_anything_was_sent() -> None:
    replay, other = Replay(1), replace(RECEIPT, version="2")
    replay.begin(RECEIPT)
    replay.begin(other)
    replay.push(Text("r", 0, "a", ()))
    replay.begin(other)
    with pytest.raises(ReplayError, match=r"version 2.* was used.*version 1.* is there"):
        replay.begin(RECEIPT)

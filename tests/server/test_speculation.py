"""What speculation came to: in an answer, on /metrics, from Python; and the same answer with it as without."""

from __future__ import annotations

import pytest

from tests.server.harness import Client, in_process, make_llm
from tests.steady_costs import SteadyCosts
from unspool.llm import LLM
from unspool.params import SamplingParams

# A bias makes the tiny model say one letter over and over, so that looking back finds what comes next.
PROMPT, LENGTH = "AB", 32
BODY = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "logit_bias": {"65": 100}}


def eager_llm() -> LLM:
    llm = make_llm(speculate="lookup")
    llm.engine.speculation.policy.costs = SteadyCosts([(1, 1.0), (64, 1.5)])
    return llm


def test_metrics_and_answers_tell_what_came_of_drafts() -> None:
    async def test(client: Client) -> None:
        answer = await client.ok("/v1/completions", BODY)
        without = await client.ok("/v1/completions", {**BODY, "speculate": "off"})
        assert answer["choices"][0]["text"] == without["choices"][0]["text"] == "A" * LENGTH
        reported = answer["unspool"]["choices"][0]["details"]["speculation"]
        assert "details" not in without["unspool"]["choices"][0]
        page = (await client.get("/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
        name = client.service.name

        def value(metric: str, more: str = "") -> float:
            return float(values[f'unspool:spec_decode_{metric}{{model_name="{name}"{more}}}'])

        assert value("num_drafts_total") == reported["steps"] > 0
        assert value("num_draft_tokens_total") == reported["drafted"] > 0
        assert value("num_accepted_tokens_total") == reported["accepted"] > LENGTH / 2
        places = [value("num_accepted_tokens_per_pos_total", f',position="{place}"') for place in range(16)]
        assert places[: len(reported["accepted_at"])] == reported["accepted_at"]
        assert sum(places) == reported["accepted"]
        assert value("mean_accepted_length") == reported["mean_accepted"] == reported["accepted"] / reported["steps"]
        assert value("saved_seconds") == pytest.approx(reported["seconds_saved"])
        assert reported["seconds_saved"] > 0

    in_process(test, llm=eager_llm())


def test_python_tells_the_same() -> None:
    llm = eager_llm()
    params = SamplingParams(max_tokens=LENGTH, temperature=0, logit_bias={65: 100})
    reported = llm.generate(PROMPT, params).choices[0].speculation
    assert reported == llm.engine.speculation.total
    assert reported.accepted + reported.steps <= LENGTH
    plain = llm.generate(
        PROMPT, SamplingParams(max_tokens=LENGTH, temperature=0, logit_bias={65: 100}, speculate="off")
    )
    assert plain.choices[0].speculation is None


def test_an_unknown_drafter_is_refused_by_name() -> None:
    async def test(client: Client) -> None:
        error = await client.refused("/v1/completions", {**BODY, "speculate": "magic"})
        assert error["param"] == "speculate"
        assert "this engine's drafters: lookup" in error["message"]

    in_process(test, llm=eager_llm())

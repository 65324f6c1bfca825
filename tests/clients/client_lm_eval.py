"""lm-eval's `local-completions`, on a small task of its own making; its scores are those of /v1/score."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from checking import MODEL, URL, check, run
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

QUESTIONS = [
    ("The capital of France is", [" Paris", " Berlin", " Tokyo"], 0),
    ("The opposite of hot is", [" seven", " cold", " green"], 1),
    ("Two plus two equals", [" horse", " blue", " four"], 2),
    ("Cats and dogs are", [" animals", " planets", " numbers"], 0),
    ("The sun rises in the", [" shoe", " east", " soup"], 1),
    ("Water freezes into", [" music", " paper", " ice"], 2),
]
model = LocalCompletionsAPI(model=MODEL, base_url=f"{URL}/v1/completions", num_concurrent=4, max_length=2048)


def scored(context: str, continuation: str) -> float:
    """The logprob of a continuation, from the server's own way to score."""
    asked = urllib.request.Request(
        f"{URL}/v1/score",
        json.dumps({"input": [model.tok_encode(context) + model.tok_encode(continuation)]}).encode(),
        {"content-type": "application/json"},
    )
    answer: dict[str, Any] = json.load(urllib.request.urlopen(asked))
    tokens = answer["data"][0]["tokens"]
    return sum(token["logprob"] for token in tokens[len(model.tok_encode(context)) :])


def asked_of(arguments: list[tuple[Any, ...]], kind: str) -> list[Any]:
    requests = [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]  # type: ignore[arg-type]
    return getattr(model, kind)(requests)


@check
def tokenizer_comes_from_the_server() -> None:
    assert model.tokenizer_backend == "remote"
    assert model.tok_encode("The sea") == model.tok_encode("The sea")
    assert model.prefix_token_id == model.tok_encode(model.tokenizer.bos_token)[0]


@check
def loglikelihoods() -> None:
    pairs = [(context, choice) for context, choices, _ in QUESTIONS for choice in choices]
    for (context, choice), (found, _) in zip(pairs, asked_of(pairs, "loglikelihood"), strict=True):
        assert abs(found - scored(context, choice)) < 1e-4, (context, choice)


@check
def rolling_loglikelihood() -> None:
    (found,) = asked_of([("The sea is wide and the sky is blue.",)], "loglikelihood_rolling")
    assert -60 < found < -10


@check
def generation_until() -> None:
    (text,) = asked_of([("Numbers: one, two, three,", {"until": ["\n"], "max_gen_toks": 8})], "generate_until")
    assert "four" in text
    assert "\n" not in text


@check
def a_task() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "questions.jsonl"
        rows = [{"question": context, "choices": choices, "answer": right} for context, choices, right in QUESTIONS]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {
            "task": "small_questions", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
            "doc_to_target": "answer", "doc_to_choice": "choices", "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        }  # fmt: skip
        results = simple_evaluate(model=model, tasks=[task], task_manager=TaskManager(), bootstrap_iters=0)
    accuracy = results["results"]["small_questions"]["acc,none"]
    expected = [
        max(range(3), key=lambda i, row=row: scored(row[0], row[1][i])) == row[2]  # type: ignore[misc]
        for row in QUESTIONS
    ]
    assert accuracy == sum(expected) / len(expected)
    assert accuracy >= 5 / 6


run("lm_eval")

"""Our task files in lm-eval's terms: a configuration for each kind, as objects here or as YAML for its command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unspool.evaluation.scorers import TaskScorer
from unspool.evaluation.tasks import MAX_TOKENS, Item, Kind, Task

SCORING = "unspool_scoring"  # a module beside written task files


def _mean(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


KINDS: Mapping[Kind, Mapping[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{query}}", "doc_to_target": "gold",
        "doc_to_choice": "choices", "metric_list": _mean("acc", "acc_norm"),
    },
    "pair": {
        "output_type": "multiple_choice", "doc_to_text": "", "doc_to_target": 0, "target_delimiter": "",
        "doc_to_choice": "{{[sentence_good, sentence_bad]}}", "metric_list": _mean("acc"),
    },
    "cloze": {
        "output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": "{{target}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}, *_mean("acc"),
        ],
    },
    "text": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
        ],
    },
    "answer": {
        "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "", "metric_list": _mean("acc"),
    },
}  # fmt: skip


def config_of(task: Task, data: Path | None = None) -> dict[str, Any]:
    """lm-eval's configuration of a task; `data`: where its lines are, if not where they are now."""
    config: dict[str, Any] = {
        "task": task.name, "dataset_path": "json", "test_split": "test", "num_fewshot": 0,
        "dataset_kwargs": {"data_files": {"test": str((data or task.path).absolute())}}, **KINDS[task.kind],
    }  # fmt: skip
    if task.kind == "answer":
        first = task.docs(1)[0]
        config["generation_kwargs"] = {
            "until": list(first.get("stop", ())), "max_gen_toks": first.get("max_tokens", MAX_TOKENS),
            "do_sample": False,
        }  # fmt: skip
        config["process_results"] = process_results
    return config


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """An answer's score, as lm-eval asks for it. Code is run confined."""
    kept = {name: value for name, value in doc.items() if value is not None}  # `datasets` fills every column
    return {"acc": TaskScorer().score(Item("", str(doc["prompt"]), doc=kept), results[0]) or 0.0}


def write(task: Task, folder: Path) -> None:
    """NAME.yaml and NAME.jsonl for `lm_eval --include_path`, whichever model it runs; answers are scored by us."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{task.name}.jsonl"
    if data.absolute() != task.path.absolute():
        data.write_bytes(task.path.read_bytes())
    config = config_of(task, data)
    function = config.pop("process_results", None)
    lines = [f"{name}: {json.dumps(value)}" for name, value in config.items()]  # JSON is YAML
    if function is not None:
        lines.append(f"process_results: !function {SCORING}.process_results")
        source = "from unspool.evaluation.harness_tasks import process_results  # noqa: F401\n"
        (folder / f"{SCORING}.py").write_text(source)
    (folder / f"{task.name}.yaml").write_text("\n".join([*lines, ""]), "utf-8")

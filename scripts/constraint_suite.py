"""Hold the json_schema constraint against the JSON-Schema-Test-Suite.

    python scripts/constraint_suite.py SUITE --model SmolLM2-135M-Instruct.Q4_1.gguf

SUITE is the suite's folder (the one with `tests/` in it; jsonschema's source distribution carries it as `json/`). Needs
`jsonschema[format]`. For every schema of every draft that the suite has:

- it is refused by name, or compiled;
- dice walk through what is compiled, many times (`--walks`); every finished document must validate;
- no instance that the suite calls invalid may be accepted; the share of valid ones that are accepted is reported
  (properties come in the schema's order, so each is tried as it stands and with its names sorted that way).

Zero invalid, zero stuck, zero wrongly accepted, or the exit code is 1. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np

from unspool.bench.walk import Dice
from unspool.errors import RequestError
from unspool.sampling.constraint import Matcher, compile_constraint
from unspool.text.tokenizer import Tokenizer, from_gguf
from unspool.weights.gguf import open_gguf

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
LARGEST = 8  # orders of the properties tried for one instance


class Report:
    def __init__(self, verbose: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.verbose = verbose

    def fault(self, kind: str, where: str, detail: str) -> None:
        self.counts[kind] += 1
        print(f"{kind.upper()} {where}: {detail}", flush=True)


def groups(suite: Path, drafts: list[str]) -> Iterator[tuple[str, str, Any, list[dict[str, Any]]]]:
    """Where, which draft, the schema, its instances."""
    for draft in drafts:
        for file in sorted((suite / "tests" / draft).rglob("*.json")):
            for number, group in enumerate(json.loads(file.read_text("utf-8"))):
                schema = group["schema"]
                if isinstance(schema, dict) and "$schema" not in schema:
                    schema = {"$schema": DRAFTS[draft], **schema}
                name = f"{file.relative_to(suite / 'tests')}[{number}] {group['description']}"
                yield name, draft, schema, group["tests"]


def judge(schema: Any, draft: str) -> Any:
    kind = jsonschema.validators.validator_for({"$schema": DRAFTS[draft]})
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def walk(root: Matcher, validator: Any, dice: Dice, args: argparse.Namespace, where: str, report: Report) -> None:
    for number in range(args.walks):
        rng = np.random.default_rng([args.seed, number])
        try:
            made = dice.walk(root.fork(), rng, limit=args.limit, haste=float(rng.choice([0.3, 1, 4])))
        except (RequestError, ValueError) as error:
            report.fault("stuck", where, str(error))
            continue
        if not made.finished:
            report.counts["cut"] += 1
            continue
        report.counts["finished"] += 1
        try:
            validator.validate(json.loads(made.text))
        except (jsonschema.ValidationError, ValueError) as error:
            report.fault("invalid", where, f"{made.text[:200]!r}: {str(error).splitlines()[0][:200]}")


def spellings(value: Any) -> list[str]:
    """Compact JSON, with the names of the outermost object in a few orders."""
    orders = [value]
    if isinstance(value, dict) and len(value) > 1:
        orders = [dict(order) for order in itertools.islice(itertools.permutations(value.items()), LARGEST)]
    return [json.dumps(order, separators=(",", ":"), ensure_ascii=False) for order in orders]


def instances(root: Matcher, tests: list[dict[str, Any]], dice: Dice, where: str, report: Report) -> None:
    for test in tests:
        try:
            texts = [text.encode() for text in spellings(test["data"])]
        except UnicodeEncodeError:
            continue  # half a surrogate pair is no text
        taken = any(dice.spells(root.fork(), text) for text in texts)
        if test["valid"]:
            report.counts["valid instances"] += 1
            report.counts["valid instances accepted"] += taken
            if not taken and report.verbose:
                print(f"narrow {where}: {texts[0][:120]!r}")
        else:
            report.counts["invalid instances"] += 1
            if taken:
                report.fault("wrongly accepted", where, f"{test['description']}: {texts[0][:200]!r}")


def run(args: argparse.Namespace, tokenizer: Tokenizer) -> Report:
    dice = Dice(tokenizer)
    report = Report(args.verbose)
    for where, draft, schema, tests in groups(args.suite, args.drafts):
        if args.only and args.only not in where:
            continue
        report.counts["schemas"] += 1
        try:
            root = compile_constraint(SimpleNamespace(kind="json_schema", value=schema), tokenizer)
        except RequestError as error:
            report.counts["refused"] += 1
            reason = re.sub(r"^the json_schema constraint: \$(?:[^:']|'[^']*')*: ", "", str(error))
            report.reasons[re.sub(r"'[^']*'|/.*/|\d+", "…", reason) if "keyword" not in reason else reason] += 1
            if args.verbose:
                print(f"refused {where}: {error}")
            continue
        report.counts["compiled"] += 1
        walk(root, judge(schema, draft), dice, args, where, report)
        instances(root, tests, dice, where, report)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, for its vocabulary")
    parser.add_argument("--drafts", nargs="*", default=list(DRAFTS), choices=list(DRAFTS))
    parser.add_argument("--walks", type=int, default=20, help="for each schema")
    parser.add_argument("--limit", type=int, default=400, help="tokens of one document")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a group's name")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    report = run(args, from_gguf(open_gguf(args.model).metadata))
    print("\nrefused for:")
    for reason, count in report.reasons.most_common(40):
        print(f"{count:6} {reason[:110]}")
    faults = {kind: report.counts[kind] for kind in ("invalid", "stuck", "wrongly accepted")}
    print(json.dumps({**dict(sorted(report.counts.items())), **faults}))
    sys.exit(1 if any(faults.values()) else 0)


if __name__ == "__main__":
    main()

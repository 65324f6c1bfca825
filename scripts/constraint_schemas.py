"""Hold the json_schema constraint against a collection of real schemas.

    python scripts/constraint_schemas.py FILE --model smollm2

FILE has one JSON object a line, with `schema` and `source` (as JSONSchemaBench's schemas can be written). Needs
`jsonschema[format]`. Each schema is refused, with its reason, or compiled; then

- dice walk through what was compiled (`--walks`), and every finished document must validate, formats included;
- the examples, defaults and constants that its subschemas give, where validators accept them, are tried: the share that
  the constraint accepts is reported.

Zero invalid and zero stuck, and at least `--least` percent compiled, or the exit code is 1. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np

from unspool.bench.constraint import load_tokenizer
from unspool.bench.walk import Dice
from unspool.errors import RequestError
from unspool.sampling.constraint import Matcher, compile_constraint
from unspool.text.tokenizer import Tokenizer


class Check:
    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.dice = Dice(tokenizer)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.seconds: list[tuple[float, str]] = []

    def run(self, source: str, schema: Any) -> None:
        self.counts["schemas"] += 1
        start = time.perf_counter()
        try:
            root = self._compiled(schema)
        except RequestError as error:
            self.counts["refused"] += 1
            reason = re.sub(r"^the json_schema constraint: \$(?:[^:']|'[^']*')*: ", "", str(error))
            self.reasons[re.sub(r"'[^']*'|\d[\d,.]*", "…", reason)] += 1
            print(f"refused {source}: {error}", flush=True)
            return
        self.seconds.append((round(time.perf_counter() - start, 3), source))
        self.counts["compiled"] += 1
        judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        self._walk(root, judge(schema, format_checker=judge.FORMAT_CHECKER), source)
        for number, (part, value) in enumerate(examples(schema)):
            if number < self.args.examples:
                self._example(part, value, judge, source)

    def _compiled(self, schema: Any) -> Matcher:
        return compile_constraint(SimpleNamespace(kind="json_schema", value=schema), self.tokenizer)

    def _walk(self, root: Matcher, validator: Any, source: str) -> None:
        for number in range(self.args.walks):
            rng = np.random.default_rng([self.args.seed, number])
            try:
                made = self.dice.walk(root.fork(), rng, limit=self.args.limit, haste=float(rng.choice([0.3, 1, 4, 20])))
            except (RequestError, ValueError) as error:
                self._fault("stuck", source, str(error))
                continue
            self.counts["finished" if made.finished else "cut"] += 1
            if made.finished:
                try:
                    validator.validate(json.loads(made.text))
                except (jsonschema.ValidationError, ValueError) as error:
                    self._fault("invalid", source, f"{made.text[:300]!r}: {str(error).splitlines()[0][:200]}")

    def _example(self, part: dict[str, Any], value: Any, judge: Any, source: str) -> None:
        if not judge(part, format_checker=judge.FORMAT_CHECKER).is_valid(value):
            return
        try:
            root = self._compiled(part)
        except RequestError:
            return
        self.counts["examples"] += 1
        texts = [json.dumps(value, ensure_ascii=False, indent=indent) for indent in (None, 2)]
        accepted = all(self.dice.spells(root.fork(), text.encode()) for text in texts)
        self.counts["examples accepted"] += accepted
        if not accepted and self.args.verbose:
            print(f"narrow {source}: {texts[0][:160]!r} for {json.dumps(part)[:300]}", flush=True)

    def _fault(self, kind: str, source: str, detail: str) -> None:
        self.counts[kind] += 1
        print(f"{kind.upper()} {source}: {detail}", flush=True)


def examples(node: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Subschemas that stand by themselves, with values that they say are theirs."""
    if isinstance(node, dict):
        if '"$ref"' not in json.dumps(node):
            given = [*_listed(node.get("examples")), *_listed(node.get("enum"))]
            given += [node[key] for key in ("default", "example", "const") if key in node]
            yield from ((node, value) for value in given)
        for key, child in node.items():
            if key in ("properties", "patternProperties", "definitions", "$defs") and isinstance(child, dict):
                yield from examples(list(child.values()))
            elif key in ("items", "additionalProperties", "allOf", "anyOf", "oneOf", "prefixItems"):
                yield from examples(child)
    elif isinstance(node, list):
        for child in node:
            yield from examples(child)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2", help="whose vocabulary: a GGUF file, a directory or a name")
    parser.add_argument("--walks", type=int, default=10, help="for each schema")
    parser.add_argument("--limit", type=int, default=400, help="tokens of one document")
    parser.add_argument("--examples", type=int, default=20, help="tried for each schema, at most")
    parser.add_argument("--least", type=float, default=95, help="percent of the schemas that must be accepted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a source's name")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    check = Check(args, load_tokenizer(args.model))
    for line in args.file.read_text("utf-8").splitlines():
        row = json.loads(line)
        if args.only in row["source"]:
            check.run(row["source"], row["schema"])
    print("\nrefused for:")
    for reason, count in check.reasons.most_common(40):
        print(f"{count:6} {reason[:110]}")
    print("slowest to compile:", sorted(check.seconds)[-5:])
    share = 100 * check.counts["compiled"] / max(check.counts["schemas"], 1)
    faults = {kind: check.counts[kind] for kind in ("invalid", "stuck")}
    print(json.dumps({**dict(sorted(check.counts.items())), **faults, "accepted_percent": round(share, 1)}))
    sys.exit(1 if any(faults.values()) or share < args.least else 0)


if __name__ == "__main__":
    main()

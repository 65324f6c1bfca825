"""Whether constraints keep answers right: facts extracted from sentences, freely, by a schema, by a named tool.

Each of thirty sentences ("Bob is 47 years old and lives in Oslo.") is given to the model at temperature 0 with the
request for JSON. An answer is right when it holds an object with the name, the age and the city of the sentence. A
constraint must not make answers worse: `schema` and `tool` should be at least as often right as `free`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from unspool import LLM

_NAMES = (
    *("Bob", "Alice", "Carlos", "Diana", "Erik", "Fatima", "George", "Hannah", "Ivan", "Julia"),
    *("Kenji", "Laura", "Mohammed", "Nina", "Oscar", "Priya", "Quentin", "Rosa", "Stefan", "Tara"),
    *("Umberto", "Vera", "Walter", "Ximena", "Yusuf", "Zoe", "Anton", "Bella", "Cedric", "Dora"),
)
_CITIES = (
    *("Oslo", "Paris", "Madrid", "Rome", "Stockholm", "Cairo", "London", "Berlin", "Moscow", "Lisbon"),
    *("Tokyo", "Vienna", "Dubai", "Prague", "Helsinki", "Mumbai", "Lyon", "Naples", "Munich", "Dublin"),
    *("Milan", "Sofia", "Chicago", "Lima", "Istanbul", "Athens", "Warsaw", "Sydney", "Geneva", "Budapest"),
)
_AGES = (
    47,
    31,
    62,
    25,
    38,
    54,
    19,
    43,
    70,
    28,
    36,
    59,
    22,
    65,
    33,
    41,
    76,
    29,
    51,
    45,
    68,
    24,
    57,
    35,
    49,
    27,
    61,
    39,
    73,
    30,
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
}
_TOOL = {"type": "function", "function": {"name": "save_person", "description": "Save a person.", "parameters": SCHEMA}}
_CHOICE = {"type": "function", "function": {"name": "save_person"}}


class Person(NamedTuple):
    name: str
    age: int
    city: str

    @property
    def question(self) -> str:
        fact = f"{self.name} is {self.age} years old and lives in {self.city}."
        return f"Extract the name, age and city as JSON: {fact}"


PEOPLE = tuple(Person(*facts) for facts in zip(_NAMES, _AGES, _CITIES, strict=True))


def is_right(text: str, person: Person) -> bool:
    """Whether the first JSON object in a text has this person's name, age and city."""
    found = _first_object(text)
    return found is not None and all(str(found.get(key)) == str(value) for key, value in person._asdict().items())


def _first_object(text: str) -> dict[str, Any] | None:
    for start, character in enumerate(text):
        if character == "{":
            try:
                value, _ = json.JSONDecoder().raw_decode(text, start)
            except ValueError:
                continue
            return value if isinstance(value, dict) else None
    return None


def _ways(llm: LLM, max_tokens: int) -> dict[str, Callable[[str], str]]:
    """How an answer is asked for: the text to be judged, by the name of the way."""
    from unspool import Constraint, SamplingParams

    def ask(question: str, constraint: Constraint | None = None, **tools: Any) -> Any:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, constraint=constraint)
        return llm.chat([{"role": "user", "content": question}], params, **tools)

    def by_schema(whitespace: str) -> Callable[[str], str]:
        schema = {**SCHEMA, "x-unspool": {"whitespace": whitespace}}
        return lambda question: str(ask(question, Constraint("json_schema", schema)).text)

    def by_tool(question: str) -> str:
        calls = ask(question, tools=[_TOOL], tool_choice=_CHOICE).tool_calls
        return str(calls[0].arguments) if calls else ""

    ways: dict[str, Callable[[str], str]] = {"free": lambda question: str(ask(question).text)}
    ways |= {"schema": by_schema("model"), "tool": by_tool}
    return ways | {f"schema, {name}": by_schema(name) for name in ("compact", "flexible")}


def measure(llm: LLM, people: Sequence[Person], max_tokens: int, verbose: bool = False) -> dict[str, int]:
    """How many answers are right, by the way in which they were asked for."""
    found = {}
    for name, ask in _ways(llm, max_tokens).items():
        found[name] = 0
        for person in people:
            text = ask(person.question)
            found[name] += is_right(text, person)
            if verbose:
                print(f"{name:>16} {'right' if is_right(text, person) else 'wrong'} {text!r}")
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks extract", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="a GGUF file, a directory or a name (smollm2)")
    parser.add_argument("--people", type=int, default=len(PEOPLE), help="how many sentences, from the first")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--verbose", action="store_true", help="print every answer")
    options = parser.parse_args(argv)
    from unspool import LLM

    people = PEOPLE[: options.people]
    with LLM(options.model) as llm:
        found = measure(llm, people, options.max_tokens, options.verbose)
    for name, right in found.items():
        print(f"{name:>16}  {right:3} of {len(people)} right")
    print(json.dumps({"model": options.model, "people": len(people), "right": found}))
    return 0

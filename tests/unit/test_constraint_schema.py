"""JSON Schemas: every finished document validates, what is not enforced is refused by name, nothing hangs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.small_vocabulary import SmallVocabulary
from unspool.bench.walk import Dice
from unspool.errors import RequestError
from unspool.models.checkpoint import Checkpoint
from unspool.sampling.constraint import Limits, Matcher, compile_constraint

VOCABULARY = SmallVocabulary()
DICE = Dice(VOCABULARY)  # type: ignore[arg-type]
CASES = json.loads((Path(__file__).parents[1] / "fixtures" / "schemas.json").read_text("utf-8"))


def made(schema: Any, **options: Any) -> Matcher:
    return compile_constraint(SimpleNamespace(kind="json_schema", value=schema), VOCABULARY, **options)


def accepts(root: Matcher, text: str, dice: Dice = DICE) -> bool:
    return dice.spells(root.fork(), text.encode())


def validator(schema: Any) -> Any:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def check_walks(root: Matcher, schema: Any, dice: Dice, walks: int, limit: int = 300) -> int:
    judge, finished = validator(schema), 0
    for seed in range(walks):
        rng = np.random.default_rng(seed)
        walk = dice.walk(root.fork(), rng, limit=limit, haste=float(rng.choice([0.5, 1, 4])))
        if walk.finished:
            finished += 1
            judge.validate(json.loads(walk.text))
    return finished


@cache
def _dice(checkpoint: Checkpoint) -> tuple[Any, Dice]:
    tokenizer = checkpoint.tokenizer()
    return tokenizer, Dice(tokenizer)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_finished_documents_validate(case: dict[str, Any]) -> None:
    root = made(case["schema"])
    assert check_walks(root, case["schema"], DICE, walks=12) > 0
    for instance in case["valid"]:
        validator(case["schema"]).validate(instance)
        assert accepts(root, json.dumps(instance, separators=(",", ":"), ensure_ascii=False)), instance
    for instance in case["invalid"]:
        assert not accepts(root, json.dumps(instance, separators=(",", ":"), ensure_ascii=False)), instance


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_finished_documents_validate_in_a_real_vocabulary(case: dict[str, Any], smollm2: Checkpoint) -> None:
    tokenizer, dice = _dice(smollm2)
    root = compile_constraint(SimpleNamespace(kind="json_schema", value=case["schema"]), tokenizer)
    assert check_walks(root, case["schema"], dice, walks=30, limit=500) > 0


# ---- refused by name, with the place

REFUSED: list[tuple[Any, str]] = [
    ({"items": {"contains": {}}}, r"\$\.items\.contains: the keyword 'contains'"),
    ({"unevaluatedProperties": False}, r"\$\.unevaluatedProperties: .*; write additionalProperties"),
    ({"unevaluatedItems": False}, r"\$\.unevaluatedItems"),
    ({"$dynamicRef": "#x"}, r"\$\.\$dynamicRef"),
    ({"type": "array", "uniqueItems": True}, r"\$\.uniqueItems: true is supported where items come from a fixed set"),
    ({"type": "array", "uniqueItems": 1}, r"\$\.uniqueItems: is 1; true or false is needed"),
    ({"not": {"items": {"type": "null"}}}, r"\$\.not: must fail here, and what fails 'items' cannot be ensured"),
    ({"type": "number", "multipleOf": 0.01}, r"\$\.multipleOf: is 0\.01; whole numbers, halves"),
    ({"type": "number", "multipleOf": 20_000}, r"\$\.multipleOf: is 20000; at most 10,000"),
    ({"type": "integer", "multipleOf": 0}, r"\$\.multipleOf: is 0; it must be above 0"),
    ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}, {"multipleOf": 9949}]}, "too large together"),
    ({"properties": {"a b": {"pattern": "(?!x)"}}}, r"\$\.properties\['a b'\]\.pattern: \(\?! is only supported right"),
    (
        {"properties": {"é": {}}, "patternProperties": {r"^\w": {}}},
        r"\$\.patternProperties\['.*'\]: validators disagree",
    ),
    ({"type": "object", "minProperties": 2}, r"\$\.minProperties: is 2; at most one more"),
    ({"$ref": "other.json"}, r"\$\.\$ref: 'other\.json' is outside this schema"),
    ({"$ref": "#/$defs/a"}, r"\$\.\$ref: '#/\$defs/a' leads nowhere"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, r"\$\.\$schema: .* is older than draft 4"),
    ({"type": "thing"}, r"\$\.type: 'thing' is no type"),
    ({"type": "string", "minLength": -1}, r"\$\.minLength: is -1"),
    ({"enum": []}, r"\$\.enum: needs a list"),
    ({"const": 2**1024}, r"\$\.const: is too large for a number"),
    ({"properties": 3}, r"\$\.properties: is 3; an object is needed"),
    ({"items": 3}, r"\$\.items: is 3; a schema is an object or a boolean"),
    ({"prefixItems": [{}], "items": [{}]}, r"\$\.items: is a list beside prefixItems"),
    ({"required": True}, r"\$\.required: needs a list of names"),
    (False, r"\$: no value satisfies"),
    ({"not": {}}, r"\$: no value satisfies"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, r"\$: no value satisfies"),
    ({"oneOf": [{"type": "string"}, {"type": "string"}]}, r"\$: no value satisfies"),
    ({"type": "string", "pattern": "^a{3}$", "maxLength": 2}, r"\$: no string satisfies pattern"),
    ({"type": "object", "required": ["a"], "properties": {"a": False}}, r"\$: no value satisfies"),
    (
        {"type": "object", "required": ["a"], "properties": {"a": {"enum": [1], "type": "null"}}},
        r"\$\.properties\.a: no",
    ),
    ("{", "the schema is not JSON"),
    ('{"type": "string", "type": "null"}', "the key 'type' comes twice"),
    ({"const": float("nan")}, "the schema is not JSON"),
    ({"const": "\ud800"}, "half a surrogate pair"),
    ({"x-unspool": {"spaces": 3}}, r"\$\.x-unspool: takes an object with 'whitespace'"),
    ({"x-unspool": {"additional_properties": 3}}, r"\$\.x-unspool\.additional_properties: is 3; true or false"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=[json.dumps(schema)[:60] for schema, _ in REFUSED])
def test_what_is_not_enforced_is_refused_by_name_and_place(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as raised:
        made(schema)
    assert raised.value.param == "constraint"


def test_a_failure_inside_llguidance_is_traced_to_its_place() -> None:
    bad = {"type": "string", "pattern": "^a{3}$", "minLength": 9}
    schema = {"type": "object", "properties": {"x": {"type": "array", "items": bad, "minItems": 1}}, "required": ["x"]}
    with pytest.raises(RequestError, match=r"\$\.properties\.x\.items: "):
        made(schema)
    below = {"$defs": {"bad": bad}, "type": "array", "items": {"$ref": "#/$defs/bad"}, "minItems": 1}
    with pytest.raises(RequestError, match=r"\$\.(\$defs\.bad|items): "):
        made(below)


def test_schemas_that_only_endless_documents_satisfy_are_refused() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    merged = {"allOf": [{"type": "object", "properties": {"n": {"$ref": "#"}}}, {"required": ["n"]}]}
    items = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    options = {"anyOf": [node | {"properties": {"next": {"$ref": "#"}}}, items]}
    for schema in (node, loop, merged, items, options, CIRCULAR):
        with pytest.raises(RequestError, match="endless"):
            made(schema)


# ---- what other engines let through


def test_a_name_has_one_spelling() -> None:
    root = made({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True})
    assert accepts(root, '{"b":"x"}')
    assert not accepts(root, '{"\\u0061":"x"}')


def test_a_name_on_which_validators_disagree_is_not_written() -> None:
    root = made({"type": "object", "patternProperties": {r"^\d+$": {"type": "integer"}}})
    for text in ('{"12":3}', '{"a":"x"}', '{"12a":"x"}', '{"é":"x"}'):
        assert accepts(root, text), text
    for text in ('{"12":"x"}', '{"٣":"x"}', '{"٣":1}'):
        assert not accepts(root, text), text
    anything = made({"type": "object", "patternProperties": {"^.*$": {"type": "integer"}}})
    assert accepts(anything, '{"a b":1}')
    assert not accepts(anything, '{"a\\n":"x"}')


def test_a_name_given_twice_cannot_fill_a_minimum() -> None:
    root = made({"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 2})
    assert accepts(root, '{"a":1,"b":2}')
    assert not accepts(root, '{"a":1,"a":2}')


def test_text_above_an_exclusive_bound_does_not_read_as_the_bound() -> None:
    root = made({"type": "number", "exclusiveMinimum": 0.1})
    assert accepts(root, "0.11")
    assert not accepts(root, "0.1000000000000000000000001")
    assert not accepts(made({"type": "number", "exclusiveMinimum": 0}), "0." + "0" * 400 + "1")


def test_keywords_beside_a_reference_count_in_every_draft() -> None:
    schema = {"$ref": "#/definitions/a", "maxLength": 2, "definitions": {"a": {"type": "string", "pattern": "^[ab]*$"}}}
    root = made({"$schema": "http://json-schema.org/draft-07/schema#", **schema})
    assert accepts(root, '"ab"')
    assert not accepts(root, '"abb"')
    assert not accepts(root, '"c"')


@pytest.mark.parametrize(
    "extra",
    [
        {"self": {"vendor": "com.example", "version": "1-0-0"}},
        {"_format": "x", "links": [{"rel": "self"}], "readonly": True, "strict": True, "nullable": True},
        {"$schema": "http://json-schema.org/draft-07/schema#", "requried": ["b"], "x-guidance": {"lenient": True}},
        {"additionalItems": False},
    ],
)
def test_unknown_keywords_are_annotations_at_every_depth(extra: dict[str, Any]) -> None:
    inner = {"type": "array", "items": {"type": "integer", **extra}, **extra}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"], **extra}
    root = made(schema)
    assert accepts(root, '{"a":[1,2]}')
    assert not accepts(root, '{"a":["x"]}')
    assert not accepts(root, "{}")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["integer", "number"]),
    st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
        st.integers(-(10**19), 10**19)
        | st.integers(-100, 100)
        | st.floats(-1e3, 1e3)
        | st.decimals(-10, 10, places=3).map(float),
        max_size=3,
    ),
    st.integers(0, 2**32),
)
def test_numbers_stay_in_any_bounds(kind: str, bounds: dict[str, float], seed: int) -> None:
    schema = {"type": kind, **bounds}
    try:
        root = made(schema)
    except RequestError:
        return  # empty, or beyond what is supported
    judge = validator(schema)
    for number in range(4):
        walk = DICE.walk(root.fork(), np.random.default_rng([seed, number]), limit=60)
        if walk.finished:
            judge.validate(json.loads(walk.text))


def test_short_numbers_below_a_long_bound_are_kept() -> None:
    root = made({"type": "number", "minimum": -3.75, "exclusiveMaximum": 1})
    for text in ("-3.7", "-3.75", "0.9", "0.99", "0.999", "0", "-1", "0.5"):
        assert accepts(root, text), text
    for text in ("-3.76", "1", "1.0", "0.99999999999999999999"):
        assert not accepts(root, text), text


def test_a_large_bound_keeps_its_neighbours() -> None:
    root = made({"type": "integer", "minimum": 2**53 - 3, "maximum": 2**53 - 1})
    assert [n for n in range(2**53 - 6, 2**53 + 3) if accepts(root, str(n))] == [2**53 - 3, 2**53 - 2, 2**53 - 1]


# ---- order and whitespace


def test_properties_come_in_the_order_of_the_schema() -> None:
    root = made({"type": "object", "properties": {"b": {}, "a": {}}, "required": ["a", "b"]})
    assert accepts(root, '{"b":1,"a":2}')
    assert not accepts(root, '{"a":2,"b":1}')


LISTED = {"type": "object", "properties": {"a": {"type": "array"}, "b": {}}, "required": ["a"]}


def test_whitespace_is_what_models_write() -> None:
    root = made(LISTED)
    for text in ('{"a": [1, 2], "b": 3}', '{"a":[1,2],"b":3}'):
        assert accepts(root, text), text
    for text in ('{"a" : []}', '{"a":  []}', '{"a":\n[]}', '{"a": [1 , 2]}', '{"a": [1,  2]}', ' {"a": []}'):
        assert not accepts(root, text), text


def test_whitespace_is_compact_or_flexible_where_asked_for() -> None:
    compact = made(LISTED | {"x-unspool": {"whitespace": "compact"}})
    assert accepts(compact, '{"a":[1,2],"b":3}')
    assert not accepts(compact, '{"a": [1,2],"b":3}')
    assert not accepts(compact, '{"a":[1, 2],"b":3}')
    flexible = made(LISTED | {"x-unspool": {"whitespace": "flexible"}})
    assert accepts(flexible, '{\n  "a" : [1, 2]\n}')
    assert accepts(flexible, '{"a":[]}')
    assert not accepts(flexible, '{"a":' + " " * 65 + "[]}")


# ---- hostile schemas

NESTED: Any = {"type": "string"}
for _ in range(200):
    NESTED = {"properties": {"a": NESTED}}
DEEPER: Any = []
for _ in range(100_000):
    DEEPER = [DEEPER]
CIRCULAR = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"}
WIDE = {"anyOf": [{"properties": {f"p{n}": {"type": "integer"}}, "required": [f"p{n}"]} for n in range(12)]}
HOSTILE: dict[str, tuple[Any, str]] = {
    "deep": (NESTED, "nests deeper than 40"),
    "deeper": ({"items": DEEPER}, "nests deeper|not JSON"),
    "large": ({"description": "x" * 300_000}, "bytes; at most 262,144"),
    "many values": ({"enum": list(range(10_001))}, r"\$\.enum: has 10,001 values"),
    "long value": ({"const": "x" * 5_000}, r"\$\.const: has 5,000 characters"),
    "many properties": ({"properties": {f"p{n}": {} for n in range(1_001)}}, "1,001 properties"),
    "many subschemas": ({"allOf": [{}] * 10_001}, "more than 10,000 subschemas"),
    "exploding pattern": ({"type": "string", "pattern": "(a{1,1000}){1,1000}"}, "1,000,000 parts"),
    "endless minimum": ({"type": "string", "minLength": 10**9}, r"\$\.minLength: is 1,000,000,000"),
    "endless items": ({"type": "array", "minItems": 10**9}, r"\$\.minItems: is 1,000,000,000"),
    "large multiple": ({"type": "integer", "multipleOf": 4_294_967_291}, r"\$\.multipleOf"),
    "product of unions": ({"allOf": [WIDE] * 8}, "more than 1,000 ways"),
    "many patterns": ({"patternProperties": {f"^a{n}$": {} for n in range(50)}}, "50 patterns; at most 32"),
    "deep constant": ({"const": json.loads("[" * 800 + "]" * 800)}, "a constant nests deeper than 40"),
    "intricate union": (
        {
            "$defs": {"u": {"anyOf": [{"allOf": [{"$ref": "#/$defs/u"}, {}]}] * 20}},
            "oneOf": [{"type": "object", "$ref": "#/$defs/u"}, {"type": "object", "$ref": "#/$defs/u"}],
        },
        "too intricate|may both accept|endless",
    ),
    "many options": ({"oneOf": [{"const": n} for n in range(3000)]}, "more than 1,000 ways"),
    "many dependents": ({"dependentRequired": {f"p{n}": ["q"] for n in range(30)}}, "more than 1,000 ways"),
    "circular": (CIRCULAR, "endless"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused(name: str) -> None:
    schema, reason = HOSTILE[name]
    with pytest.raises(RequestError, match=reason):
        made(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "maxItems": 10**12},
        {"type": "string", "maxLength": 10**12},
        {"type": "object", "additionalProperties": True, "maxProperties": 10**9},
        {"enum": [f"value {n}" for n in range(9_000)]},
        {"type": "string", "pattern": "(x+x+)+y"},
        {"type": "string", "pattern": "^(a|b)*a(a|b){200}$"},
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(900)}},
    ],
    ids=lambda schema: json.dumps(schema)[:50],
)
def test_large_numbers_that_cost_little_are_taken(schema: Any) -> None:
    check_walks(made(schema), schema, DICE, walks=2, limit=60)


def test_long_chains_of_references_do_not_overflow_the_stack() -> None:
    links = {f"n{n}": {"properties": {"x": {"$ref": f"#/$defs/n{n + 1}"}}, "required": ["x"]} for n in range(3000)}
    schema = {"$defs": {**links, "n3000": {"type": "null"}}, "$ref": "#/$defs/n0"}
    made(schema).mask()


def test_limits_can_be_set() -> None:
    assert made({"items": {"items": {"items": {}}}})
    with pytest.raises(RequestError, match="nests deeper than 2"):
        made({"items": {"items": {"items": {}}}}, limits=Limits(max_depth=2))

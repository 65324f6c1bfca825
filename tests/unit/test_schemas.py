"""Types as the shape of answers: their schemas, the values that come back, and what is refused."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from unspool.errors import ParseError, RequestError
from unspool.schemas import answer_type


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Place:
    """Where somebody lives."""

    city: str
    zip: int | None = None


@dataclass
class Person:
    name: str
    height: float
    tags: list[str]
    home: Place
    sex: Literal["f", "m"] = "f"
    colour: Colour = Colour.RED
    scores: dict[str, int] = field(default_factory=dict)
    friends: tuple[Person, ...] = ()


TEXT = {
    "name": "Ada", "height": 2, "tags": ["a"], "home": {"city": "Oslo", "zip": None}, "sex": "f", "colour": "blue",
    "scores": {"x": 1}, "friends": [],
}  # fmt: skip


def test_a_dataclass_comes_back_as_itself() -> None:
    shape = answer_type(Person)
    person = shape.parse(json.dumps({**TEXT, "friends": [TEXT]}))
    assert person.friends[0] == Person("Ada", 2.0, ["a"], Place("Oslo"), "f", Colour.BLUE, {"x": 1})
    assert isinstance(person.height, float)
    assert shape.schema["$ref"] == "#/$defs/Person"
    place = shape.schema["$defs"]["Place"]
    assert place["description"] == "Where somebody lives."
    assert place["required"] == ["city", "zip"]
    assert place["properties"]["zip"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}


def test_a_pydantic_model_comes_back_as_itself() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Point", x=(int, ...), y=(int, pydantic.Field(le=9)))
    shape = answer_type(model)
    assert shape.parse('{"x": 1, "y": 2}') == model(x=1, y=2)
    assert shape.schema["properties"]["y"]["maximum"] == 9
    with pytest.raises(ParseError, match="no whole Point"):
        shape.parse('{"x": 1, "y": 20}')


def test_a_schema_gives_what_json_reads() -> None:
    assert answer_type({"type": "object"}).parse('{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize(
    "change", [{"height": "tall"}, {"tags": "a"}, {"sex": "x"}, {"colour": "green"}, {"home": 3}, {"scores": []}]
)
def test_a_value_of_another_type_is_a_parse_error(change: dict[str, Any]) -> None:
    with pytest.raises(ParseError, match="no whole Person"):
        answer_type(Person).parse(json.dumps(TEXT | change))


def test_a_text_that_was_cut_is_a_parse_error_that_shows_it() -> None:
    with pytest.raises(ParseError, match=r"the text is '\{"):
        answer_type(Person).parse('{"name": "A')


@dataclass
class Bad:
    when: complex


@pytest.mark.parametrize("shape", [int, "Person", Person("a", 1.0, [], Place("x")), Bad])
def test_what_is_no_shape_is_refused(shape: Any) -> None:
    with pytest.raises(RequestError) as refused:
        answer_type(shape)
    assert refused.value.param == "schema"
    if shape is Bad:
        assert "Bad.when" in str(refused.value)

"""instructor: pydantic models in its modes for OpenAI-compatible servers and for Anthropic's API."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import anthropic
import instructor
import openai
import pydantic
from checking import MODEL, URL, check, run
from instructor.core.exceptions import IncompleteOutputException

OPENAI = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
BOB: list[Any] = [{"role": "user", "content": "Extract: Bob is 47 years old and lives in Oslo."}]


class Person(pydantic.BaseModel):
    name: str
    age: int
    city: Literal["Oslo", "Rome"]


BOBS = {"name": "Bob", "age": 47, "city": "Oslo"}


def extracted(mode: Any) -> dict[str, Any]:
    client = instructor.from_openai(OPENAI, mode=mode)
    person = client.chat.completions.create(
        model=MODEL, messages=BOB, response_model=Person, temperature=0, max_tokens=100, max_retries=0
    )
    return person.model_dump()


@check
def tools_mode() -> None:
    assert extracted(instructor.Mode.TOOLS) == BOBS


@check
def json_mode() -> None:
    """Any object: it is held to the schema by words alone, which a small model takes for the answer."""
    with contextlib.suppress(IncompleteOutputException):
        assert extracted(instructor.Mode.JSON)


@check
def json_schema_mode() -> None:
    assert extracted(instructor.Mode.JSON_SCHEMA) == BOBS


@check
def partial_stream() -> None:
    client = instructor.from_openai(OPENAI, mode=instructor.Mode.JSON_SCHEMA)
    parts = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=BOB, response_model=Person, temperature=0, max_tokens=100
        )
    )
    assert len(parts) > 3
    assert parts[-1].age == 47


@check
def lists_of_models() -> None:
    client = instructor.from_openai(OPENAI, mode=instructor.Mode.JSON_SCHEMA)
    people = client.chat.completions.create(
        model=MODEL, messages=BOB, response_model=list[Person], temperature=0, max_tokens=200, max_retries=0
    )
    assert people
    assert (people[0].age, people[0].city) == (47, "Oslo")


@check
def anthropic_tools() -> None:
    client = instructor.from_anthropic(
        anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=300),
        mode=instructor.Mode.ANTHROPIC_TOOLS,
    )
    person = client.chat.completions.create(
        model=MODEL, messages=BOB, response_model=Person, max_tokens=100, max_retries=0
    )
    assert person.city in ("Oslo", "Rome")


run("instructor")

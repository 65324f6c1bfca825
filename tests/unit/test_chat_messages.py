"""Messages from Python: the first wrong field is named, and templates get what they read."""

from __future__ import annotations

from typing import Any

import pytest

from unspool.chat.messages import check_messages, for_template
from unspool.errors import RequestError


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": "a"}, {"role": 3, "content": "b"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": "f()"}], "messages[0].tool_calls"),
    ],
)
def test_the_bad_field_is_named(messages: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_messages(messages)
    assert caught.value.param == field
    assert str(caught.value).startswith(field)


def test_parts_are_joined_and_the_callers_messages_are_left_as_they_are() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    check_messages(parts)
    assert for_template(parts) == [{"role": "user", "content": "ab"}]
    assert parts[0]["content"] != "ab"


def test_calls_become_what_templates_read() -> None:
    function = {"name": "look", "arguments": '{"at": 1}'}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function, "index": 0}]}
    check_messages([message])
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}, "id": "c"}
    assert for_template([message]) == [{"role": "assistant", "content": None, "tool_calls": [call]}]
    answered = for_template([message, {"role": "tool", "tool_call_id": "c", "content": "sky"}])
    assert answered[1]["name"] == "look"


@pytest.mark.parametrize("call", [{"name": "f", "arguments": {}}, {"function": "f"}, {}])
def test_calls_in_another_form_pass_as_they_are(call: Any) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [call]}
    check_messages([message])
    assert for_template([message]) == [message]


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", "", "[" * 5000])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert for_template([message])[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_roles_and_fields_of_templates_pass() -> None:
    message = {"role": "critic", "content": "x", "mood": 3}
    check_messages((message,))
    assert for_template((message,)) == [message]

"""Chat templates: what they render, what they are refused, and that none of them runs away."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from unspool.errors import ModelError, RequestError
from unspool.text import sandbox
from unspool.text.chat import MAX_SOURCE, ChatTemplate, validate_messages

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
HELLO = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = HELLO, **options: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, **options)


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{{ tools is none }} {{ enable_thinking is defined }}", "True False"),
        ("{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% endfor %}", "1True1"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ('{{ {"b": "<é>", "a": [1]} | tojson }}', '{"b": "<é>", "a": [1]}'),
        ('{{ {"b": 1} | tojson(indent=2) }}', '{\n  "b": 1\n}'),
        ("{% set ns = namespace(x='') %}{% for c in 'ab' %}{% set ns.x = c ~ ns.x %}{% endfor %}{{ ns.x }}", "ba"),
        ("{{ ['a', 'b'] | join('-') }} {{ 'aXb' | replace('X', '+') }} {{ '%s!' | format('a') }}", "a-b a+b a!"),
        ("{{ '%d%%' % 5 }} {{ '{:>3}'.format(7) }} {{ 'a.b'.split('.')[-1] }}", "5%   7 b"),
        ("{% for x in [[1, [2]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "12"),
        ("{% for m in nothing %}{% else %}none{% endfor %}", "none"),
        ("    {% if true %}\nx\n    {% endif %}\n", "x\n"),
    ],
)
def test_what_templates_use_works(source: str, expected: str) -> None:
    assert render(source) == expected


def test_options_reach_the_template_and_tools_too() -> None:
    assert render("{{ enable_thinking }}{{ tools[0].name }}", enable_thinking=False, tools=[{"name": "f"}]) == "Falsef"


def test_the_date_can_be_asked_for() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_a_refusal_is_quoted() -> None:
    with pytest.raises(RequestError, match="refuses them: only user messages, please") as caught:
        render("{{ raise_exception('only user messages, please') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ lipsum() }}",
    ],
)
def test_a_template_that_fails_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template failed") as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a'.ljust(10**12) }}",
        "{{ 'a' | center(10**12) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ ('a' * 10000000).replace('a', 'a' * 10000000) }}",
        "{{ ('a' * 10000000) | replace('a', 'a' * 10000000) }}",
        "{{ (['a' * 10000000] * 1000) | join }}",
        "{{ ''.join(['a' * 10000000] * 1000) }}",
    ],
)
def test_nothing_runs_away(source: str) -> None:
    with pytest.raises(RequestError, match="was stopped"):
        render(source)


def test_limits_are_whole_again_for_the_next_rendering() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}done")
    for _ in range(2 * sandbox.MAX_STEPS // 99_999):
        assert template.render(HELLO) == "done"


def test_threads_do_not_share_an_allowance() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}done")
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(template.render(HELLO))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["done"] * 12


def test_a_template_that_does_not_parse_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="chat template: line 2"):
        ChatTemplate("ok\n{% if %}")
    with pytest.raises(ModelError, match="characters"):
        ChatTemplate("x" * (MAX_SOURCE + 1))
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


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
        validate_messages(messages)
    assert caught.value.param == field
    assert str(caught.value).startswith(field)


def test_parts_are_joined_and_tool_calls_pass() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert validate_messages(parts) == [{"role": "user", "content": "ab"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert validate_messages([call]) == [{**call, "content": ""}]
    assert parts[0]["content"] != "ab", "the caller's messages are left as they are"

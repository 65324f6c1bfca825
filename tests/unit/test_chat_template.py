"""Chat templates: what they render, what they are refused, and that none of them runs away."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from unspool import isolation
from unspool.chat import template as chat
from unspool.chat.template import MAX_SOURCE, ChatTemplate
from unspool.errors import ModelError, RequestError
from unspool.isolation import LimitedProcess

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
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


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


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[LimitedProcess]:
    """The renderer with small limits, so that a test of them is a short one."""
    renderer = LimitedProcess("unspool.chat.sandbox", ("jinja2", "markupsafe"), 96 << 20, 1 << 20)
    monkeypatch.setattr(chat, "_renderer", renderer)
    monkeypatch.setattr(chat, "MAX_SECONDS", 1.0)  # of processor time
    monkeypatch.setattr(isolation, "PATIENCE", 600)
    yield renderer
    renderer.close()


DOUBLED = "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = "
MEMORY_BOMBS = [
    "{{ ('{0:99999}' * 100000).format(1) }}",
    "{{ ('%99999d' * 1000) % ((1,) * 1000) * 9 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ ('\\t' * 1000000).expandtabs(100000) }}",
    "{{ ('a' * 1000000).translate({97: 'b' * 100000}) }}",
    "{{ ([[1]] * 1000) | tojson(indent=100000) }}",
    "{{ ('a\\n' * 10000) | indent(100000) }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    f"{DOUBLED}ns.x ~ ns.x %}}{{% endfor %}}",
    f"{DOUBLED}ns.x + ns.x %}}{{% endfor %}}",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = x %}{% endfor %}",
    f"{{% macro f(s) %}}{{{{ s }}}}{{{{ s }}}}{{% endmacro %}}{DOUBLED}f(ns.x) %}}{{% endfor %}}",
    "{% filter replace('a', 'a' * 100000) %}{{ 'a' * 1000000 }}{% endfilter %}",
    "{{ ('a' * 10000000).replace('a', 'a' * 10000000) }}",
    "{{ (['a' * 1000000] * 1000) | join('b') }}",
    "{{ 10**10 * [1] }}",
    "{{ 'a'.ljust(10**12) }}{{ 'a'.zfill(10**12) }}",
    "{{ 'a' | center(10**12) }}",
    "{{ messages | pprint * 100000000 }}",
]
TIME_BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ (10**4000) ** 4000 }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]


@pytest.mark.parametrize("source", MEMORY_BOMBS)
def test_memory_is_limited(strict: LimitedProcess, source: str) -> None:
    with pytest.raises(ModelError, match="chat template: it was stopped: it took more than 96 MiB of memory"):
        render(source)


@pytest.mark.parametrize("source", TIME_BOMBS)
def test_time_is_limited_within_c_calls_too(strict: LimitedProcess, source: str) -> None:
    with pytest.raises(ModelError, match="chat template: it was stopped: it took more than 1 seconds"):
        render(source)


def test_a_prompt_of_any_length_is_not_taken(strict: LimitedProcess) -> None:
    with pytest.raises(ModelError, match=r"stopped: an answer of .* bytes; at most 1,048,576 are taken"):
        render("{{ 'x' * 2000000 }}")
    with pytest.raises(ModelError, match="stopped: it wrote more than 16,777,216 characters"):
        render("{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}")


def test_a_template_that_was_stopped_does_no_harm_to_the_next(strict: LimitedProcess) -> None:
    for _ in range(2):
        with pytest.raises(ModelError, match="was stopped"):
            render("{{ 'a' * 10**10 }}")
        assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_too_large_for_the_template_is_the_requests_fault(strict: LimitedProcess) -> None:
    content = "a" * 200_000
    with pytest.raises(RequestError, match="too much for the model's chat template, which was stopped") as caught:
        render(
            "{{ messages[0].content | list | length * messages[0].content }}", [{"role": "user", "content": content}]
        )
    assert caught.value.param == "messages"


def test_many_threads_share_the_renderer() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    answers: dict[str, str] = {}

    def work(text: str) -> None:
        answers[text] = template.render([{"role": "user", "content": text}])

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {str(number): str(number) for number in range(12)}


def test_a_template_that_does_not_parse_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="chat template: line 2"):
        ChatTemplate("ok\n{% if %}")
    with pytest.raises(ModelError, match="characters"):
        ChatTemplate("x" * (MAX_SOURCE + 1))
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
    with pytest.raises(ModelError, match="chat template: Exceeds the limit"):
        ChatTemplate("{{ 1" + "0" * 5000 + " }}")


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if messages[0]['content'] is none %}call{% endif %}", "call"),
        ("{% if messages[0].content is not none %}text{% else %}call{% endif %}", "call"),
        ("{% set content = messages[0].content %}{% if content == none %}call{% endif %}", "call"),
        ("{{ '<' + messages[0].content + '>' }}{% if tools is none %}!{% endif %}", "<>!"),
        ("{{ messages[0]['content'] | trim }}.", "."),
    ],
)
def test_no_content_is_none_to_templates_that_know_it(source: str, expected: str) -> None:
    assert render(source, [CALL]) == expected


def test_the_tokenizers_tokens_reach_the_template() -> None:
    tokens = {"bos_token": "<b>", "eos_token": "<e>", "unk_token": "<u>", "additional_special_tokens": ["<x>"]}
    source = "{{ bos_token + eos_token + unk_token + additional_special_tokens[0] }}{{ pad_token is defined }}"
    assert ChatTemplate(source, tokens).render(HELLO) == "<b><e><u><x>False"
    assert ChatTemplate("{{ bos_token + eos_token }}.").render(HELLO) == "."


def test_a_template_for_tools_is_taken_when_there_are_tools() -> None:
    template = ChatTemplate("plain", tool_use="tools: {{ tools[0].name }}")
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{"name": "f"}]) == "tools: f"
    with pytest.raises(ModelError, match="chat template: line 1"):
        ChatTemplate("plain", tool_use="{% if %}")


class Message(Mapping[str, Any]):
    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Parts(Sequence[Any]):
    def __getitem__(self, index: Any) -> Any:
        return ("a", "b")[index]

    def __len__(self) -> int:
        return 2


def test_any_mapping_and_sequence_can_be_rendered() -> None:
    assert (
        render("{{ messages[0].content }}{{ x | join }}", [Message(role="user", content="hi ")], x=Parts()) == "hi ab"
    )
    assert render("{{ x }}\ud800", x="\ud83d") == "\ud83d\ud800"
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    for value in (object(), nested, b"bytes"):
        with pytest.raises(RequestError, match="cannot be written as JSON"):
            render("{{ x }}", x=value)

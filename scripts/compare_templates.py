"""Chat templates of other projects: a call that a template writes is read back as the call that it was.

    python scripts/compare_templates.py DIR        DIR has *.jinja, as llama.cpp's source has them in models/templates

A conversation whose assistant calls a function is rendered, and what the template made of the call is parsed in the
format that the template's text implies. The last line is JSON: what became of the call, by template.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from unspool.chat.answers import AnswerSyntax, Message
from unspool.chat.call_formats import format_of
from unspool.chat.reasoning import reasoning_format_of
from unspool.chat.template import ChatTemplate
from unspool.errors import UnspoolError

ARGUMENTS = {
    "city": 'Os"lo\n{5}',
    "days": 3,
    "units": ["C", "F"],
    "exact": True,
    "near": {"lat": 59.9, "why": "it's <b>"},
}
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "units": {"type": "array", "items": {"type": "string"}},
    "exact": {"type": "boolean"},
    "near": {"type": "object", "properties": {"lat": {"type": "number"}, "why": {"type": "string"}}},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": PARAMETERS}}
QUESTION = {"role": "user", "content": "What is it like there?"}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }


def written_call(template: ChatTemplate) -> str:
    """What follows the question where it was answered by a call."""
    error: UnspoolError | None = None
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        try:
            asked = template.render([QUESTION], tools=[TOOL], add_generation_prompt=False)
            answered = template.render([QUESTION, call(arguments)], tools=[TOOL], add_generation_prompt=False)
        except UnspoolError as found:
            error = found
            continue
        same = next((i for i, (a, b) in enumerate(zip(asked, answered, strict=False)) if a != b), len(asked))
        return answered[same:]
    assert error is not None
    raise error


def check(source: str) -> str:
    template = ChatTemplate(source)
    format = format_of(template.tool_source)
    try:
        written = written_call(template)
    except UnspoolError as error:
        return f"{format.name}: not rendered: {str(error)[:90]}"
    if "weather" not in written:
        return f"{format.name}: the template does not write calls"
    at = max(written.find(format.opens), 0) if not format.is_bare else written.find("{")
    reasoning = reasoning_format_of(source)
    syntax = AnswerSyntax(
        format,
        frozenset({"weather"}),
        reasoning=reasoning if reasoning is not None and reasoning.name == "harmony" else None,
        schemas={"weather": PARAMETERS},
    )
    if syntax.reasoning is not None:
        at = written.find("<|start|>assistant")
    message = Message(None, syntax)
    message.push(written[at:])
    message.flush()
    if [found.name for found in message.calls] != ["weather"]:
        return f"{format.name}: NO CALL in {written[at : at + 120]!r}"
    found = message.calls[0].values
    return f"{format.name}: read" if found == ARGUMENTS else f"{format.name}: DIFFERS: {found}"


def main(folder: str) -> None:
    found = {}
    for file in sorted(Path(folder).glob("*.jinja")):
        found[file.stem] = check(file.read_text("utf-8"))
        print(f"{file.stem}: {found[file.stem]}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

"""How families of models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallFormat:
    """The marks around calls and the shape of a call."""

    name: str
    opens: str  # the mark before a call, or before a run of calls
    closes: str = ""  # the mark after one
    joins: str = ""  # characters that may stand around and between the calls of a run
    is_bare: bool = False  # an answer that begins with "{" is a call, without a mark
    name_key: str = "name"  # of the function's name in a call's object
    key: str = "arguments"  # of the arguments in a call's object
    argues: str = ""  # the mark between a call's name and its arguments, where a call is not one object of both
    id_length: int | None = None  # of a call's id, where the template checks it

    @property
    def marks(self) -> tuple[str, ...]:
        """Those that a vocabulary may have as control tokens."""
        return (self.opens, self.argues) if self.argues else (self.opens,)

    def new_call_id(self) -> str:
        import secrets

        return secrets.token_hex(12)[: self.id_length] if self.id_length else f"call_{secrets.token_hex(12)}"


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")  # Qwen's too
LLAMA3 = CallFormat("llama3", "<|python_tag|>", joins=";,", is_bare=True, key="parameters")
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", joins="[],", id_length=9)
MISTRAL_ARGS = CallFormat("mistral", "[TOOL_CALLS]", argues="[ARGS]", id_length=9)  # since its eleventh tokenizer
# For templates without tools: we describe it ourselves. The function stands under another key than "name", because
# small models take that for the name of which the user speaks, and then copy it wrong into the arguments.
GENERIC = CallFormat("generic", "<tool_call>", "</tool_call>", name_key="function")


def format_of(template: str) -> CallFormat:
    """The format that a chat template's own text uses."""
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<|python_tag|>" in template or '"parameters"' in template:
        return LLAMA3
    return GENERIC

"""How families of models write tool calls: the marks around a run of calls, and the shape of one call in it.

ObjectCall    <tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>
NamedCall     [TOOL_CALLS]look[ARGS]{"at": 3}
TaggedCall    <tool_call><function=look><parameter=at>3</parameter></function></tool_call>
BareCall      <|tool_call>call:look{at:3}<tool_call|>
PythonCall    <|tool_call_start|>[look(at=3)]<|tool_call_end|>
"""

from __future__ import annotations

from unspool.records import record


@record(frozen=True)
class ObjectCall:
    """A JSON object with the name and the arguments; `extra` comes before both, as models write it."""

    name_key: str = "name"
    arguments_key: str = "arguments"
    extra: str = ""
    begins: str = "{"
    marks: tuple[str, ...] = ()


@record(frozen=True)
class NamedCall:
    """The function's name, a mark, and a JSON object of the arguments. `prefix` comes before the name; a colon and a
    number (`counts`), or `id_mark` and an id, may follow it."""

    separator: str
    begins: str = ""
    prefix: str = ""
    counts: bool = False
    id_mark: str = ""
    ends: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark.strip() for mark in (self.begins, self.separator, self.id_mark, self.ends) if mark.strip())


@record(frozen=True)
class TaggedCall:
    """The name in a tag, and each argument between tags: text as it is, other values as JSON. `pad` is on both sides of
    a value, `line` after each tag, as models write it; all of them are optional."""

    begins: str
    name_ends: str
    parameter: str
    key_ends: str
    value_ends: str
    ends: str
    value_begins: str = ""
    pad: str = ""
    line: str = "\n"
    marks: tuple[str, ...] = ()


@record(frozen=True)
class BareCall:
    """Gemma's: names without quotes, text between marks of its own, numbers and true and false as in JSON."""

    begins: str = "call:"
    quote: str = '<|"|>'

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.quote,)


@record(frozen=True)
class PythonCall:
    """A call as Python writes it, with arguments by name."""

    begins: str = ""
    marks: tuple[str, ...] = ()


_OBJECT = ObjectCall()


@record(frozen=True)
class CallFormat:
    """The marks around calls and the shape of a call.

    `joins`, `lead`, `tail`, `more` and `again` are the text between the parts: `opens lead CALL more CALL tail closes
    again opens …`. A format with `more` has several calls between one pair of marks.
    """

    name: str
    opens: str  # the mark before a call, or before a run of calls
    closes: str = ""  # the mark after one
    call: ObjectCall | NamedCall | TaggedCall | BareCall | PythonCall = _OBJECT
    joins: str = ""  # characters that may stand around and between the calls of a run
    lead: str = ""  # between the opening mark and a call
    tail: str = ""  # between the last call and the closing mark
    more: str | None = None  # between two calls of a run; None: a run has one
    again: str = ""  # between two runs
    is_bare: bool = False  # an answer that begins with "{" is a call, without a mark
    id_length: int | None = None  # of a call's id, if the template checks it

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that a vocabulary may have as control tokens."""
        return tuple(mark for mark in (self.opens, self.closes, *self.call.marks) if mark)

    def new_call_id(self) -> str:
        import secrets

        return secrets.token_hex(12)[: self.id_length] if self.id_length else f"call_{secrets.token_hex(12)}"


def _lines(name: str, opens: str, closes: str, call: ObjectCall | TaggedCall) -> CallFormat:
    """Each call on lines of its own, between marks on lines of their own."""
    return CallFormat(name, opens, closes, call, lead="\n", tail="\n", again="\n")


def _list(
    name: str, opens: str, closes: str = "", call: ObjectCall = _OBJECT, id_length: int | None = None
) -> CallFormat:
    """The calls of a run are a JSON array."""
    return CallFormat(name, opens, closes, call, joins="[],", lead="[", tail="]", more=", ", id_length=id_length)


HERMES = _lines("hermes", "<tool_call>", "</tool_call>", ObjectCall())  # Qwen's too
LLAMA3 = CallFormat(
    "llama3", "<|python_tag|>", call=ObjectCall(arguments_key="parameters"), joins=";,", more="; ", is_bare=True
)
MISTRAL = _list("mistral", "[TOOL_CALLS]", id_length=9)
# Since its eleventh tokenizer.
MISTRAL_ARGS = CallFormat("mistral-args", "[TOOL_CALLS]", call=NamedCall("[ARGS]"), id_length=9)
MISTRAL_IDS = CallFormat(  # Mistral Small 3.2
    "mistral-ids", "[TOOL_CALLS]", call=NamedCall("[ARGS]", id_mark="[CALL_ID]"), id_length=9
)
QWEN_XML = _lines(  # Qwen 3 Coder, Qwen 3.5, Nemotron 3, Step
    "qwen-xml",
    "<tool_call>",
    "</tool_call>",
    TaggedCall("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", pad="\n"),
)
SEED = _lines(
    "seed",
    "<seed:tool_call>",
    "</seed:tool_call>",
    TaggedCall("<function=", ">", "<parameter=", ">", "</parameter>", "</function>"),
)
MINIMAX = CallFormat(
    "minimax",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    TaggedCall('<invoke name="', '">', '<parameter name="', '">', "</parameter>", "</invoke>"),
    lead="\n",
    tail="\n",
    more="\n",
)
# GLM's call ends with the mark of its run; the newer ones write no line breaks.
GLM = CallFormat(
    "glm",
    "<tool_call>",
    call=TaggedCall("", "", "<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", "<arg_value>"),
    again="\n",
)
GLM_FLAT = CallFormat(
    "glm-flat",
    "<tool_call>",
    call=TaggedCall("", "", "<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", "<arg_value>", line=""),
)
GEMMA4 = CallFormat("gemma", "<|tool_call>", "<tool_call|>", BareCall())
DEEPSEEK = CallFormat(  # V3.1
    "deepseek",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    NamedCall("<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", ends="<｜tool▁call▁end｜>"),
    more="",
)
DEEPSEEK_FENCED = CallFormat(  # V3, R1
    "deepseek-fenced",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    NamedCall("\n```json\n", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", ends="\n```<｜tool▁call▁end｜>"),
    more="\n",
)
KIMI = CallFormat(
    "kimi",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    NamedCall(
        "<|tool_call_argument_begin|>",
        "<|tool_call_begin|>",
        prefix="functions.",
        counts=True,
        ends="<|tool_call_end|>",
    ),
    more="",
)
GRANITE3 = _list("granite", "<|tool_call|>")  # Granite 4 writes Hermes'
NEMOTRON2 = _list("nemotron", "<TOOLCALL>", "</TOOLCALL>")
COMMAND = _list(
    "command",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    ObjectCall("tool_name", "parameters", extra='"tool_call_id": "0", '),
)
TOOL_CALLS = _list("tool-calls", "<tool_calls>", "</tool_calls>")  # Apriel
LFM2 = CallFormat(
    "lfm2", "<|tool_call_start|>", "<|tool_call_end|>", PythonCall(), joins="[],", lead="[", tail="]", more=", "
)
# gpt-oss': a call is a message to the function, in a channel of its own; `chat/harmony.py` reads it.
HARMONY = CallFormat(
    "harmony",
    "<|channel|>commentary to=functions.",
    "<|call|>",
    NamedCall(" <|constrain|>json<|message|>"),
)
# For templates without tools; the message describes the format. The key is not "name", because small models confuse
# that with a name that the user mentions, and then copy it into the arguments.
GENERIC_CALL = ObjectCall("function")
GENERIC = _lines("generic", "<tool_call>", "</tool_call>", GENERIC_CALL)

# The first format with all of its marks in the template is used.
_BY_MARKS: tuple[tuple[CallFormat, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>", "to=")),
    (MINIMAX, ("<minimax:tool_call>", "<invoke")),
    (SEED, ("<seed:tool_call>", "<function=")),
    (GLM_FLAT, ("<tool_call>", "</arg_key><arg_value>")),
    (GLM, ("<tool_call>", "<arg_key>")),
    (QWEN_XML, ("<tool_call>", "<function=")),
    (GEMMA4, ("<|tool_call>", "call:")),
    (DEEPSEEK_FENCED, ("<｜tool▁calls▁begin｜>", "```json")),
    (DEEPSEEK, ("<｜tool▁calls▁begin｜>",)),
    (KIMI, ("<|tool_calls_section_begin|>",)),
    (COMMAND, ("<|START_ACTION|>", '"tool_name"')),
    (NEMOTRON2, ("<TOOLCALL>",)),
    (GRANITE3, ("<|tool_call|>",)),
    (LFM2, ("<|tool_call_start|>",)),
    (LFM2, ("<|tool_list_start|>",)),
    (TOOL_CALLS, ("<tool_calls>[",)),
    (HERMES, ("<tool_call>",)),
    (MISTRAL_IDS, ("[TOOL_CALLS]", "[CALL_ID]")),
    (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (LLAMA3, ("<|python_tag|>",)),
    (LLAMA3, ('"parameters"',)),
)


def format_of(template: str) -> CallFormat:
    """The format that a chat template's own text uses."""
    for format, marks in _BY_MARKS:
        if all(mark in template for mark in marks):
            return format
    return GENERIC

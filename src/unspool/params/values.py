"""Parameters that are objects: constraints, beam search, the detector of repetition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from unspool.errors import RequestError
from unspool.params import checks
from unspool.params.kinds import MAX_STRINGS, Anything, Either, Flag, Integer, Kind, Number, Text, Word
from unspool.records import record

ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)


@record(frozen=True)
class Constraint:
    """What an answer must look like: `value` is a schema, an expression, the choices or a grammar, by `kind`.

    >>> llm.generate("Is the sea salty? Answer:", constraint=Constraint("choice", [" yes", " no"])).finish_reason
    'constraint'
    """

    FIELDS: ClassVar[Mapping[str, Kind]] = {
        "kind": Word(CONSTRAINT_KINDS),
        "value": Anything("A schema, expression, list or grammar, by kind."),
    }

    kind: ConstraintKind
    value: Any = None  # json_object needs none

    def __post_init__(self) -> None:
        if self.kind not in CONSTRAINT_KINDS:
            raise RequestError(f"constraint is {self.kind!r}; allowed: {', '.join(CONSTRAINT_KINDS)}", "constraint")
        if self.kind in ("regex", "grammar") and (not isinstance(self.value, str) or not self.value):
            raise RequestError(f"a {self.kind} constraint needs a non-empty string, not {self.value!r}", "constraint")
        if self.kind == "json_schema" and not isinstance(self.value, dict | bool | str):
            raise RequestError(f"a json_schema constraint needs a schema, not {self.value!r}", "constraint")
        if self.kind == "choice":
            choices = checks.strings("constraint", self.value, MAX_STRINGS)
            if not choices:
                raise RequestError("a choice constraint needs at least one choice", "constraint")
            object.__setattr__(self, "value", choices)


@record(frozen=True)
class ThinkingMarks:
    """How an answer's thinking is told from the rest: by the marks around it.

    `written_close` is the text that closes thinking whose budget is spent, and `before_answer` what stands between a
    closing mark and an answer that is held to a constraint. `is_open`: the prompt has the opening mark already.
    """

    FIELDS: ClassVar[Mapping[str, Kind]] = {
        "opens": Text(),
        "closes": Text(),
        "written_close": Text(),
        "before_answer": Text(),
        "is_open": Flag(),
    }

    opens: str
    closes: str
    written_close: str = ""
    before_answer: str = ""
    is_open: bool = False

    def __post_init__(self) -> None:
        for name, kind in self.FIELDS.items():
            kind.check(f"thinking_marks.{name}", getattr(self, name))
        for name in ("opens", "closes"):
            if not getattr(self, name):
                field = f"thinking_marks.{name}"
                raise RequestError(f"{field} is empty; it is the mark to look for", field)


@record(frozen=True)
class BeamParams:
    """Beam search instead of a draw: the `width` best prefixes, by their logprobs' sum over length**length_penalty."""

    FIELDS: ClassVar[Mapping[str, Kind]] = {
        "width": Integer(1, 256),
        "length_penalty": Number(-100, 100),
        "early_stopping": Either((Flag(), Word(("never",))), range="true, false or 'never'"),
    }

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False  # as in transformers

    def __post_init__(self) -> None:
        for name, kind in self.FIELDS.items():
            kind.check(f"beam.{name}", getattr(self, name))


@record(frozen=True)
class RepetitionDetector:
    """Finish (reason `repetition`) when the output ends in one run of at most `period` tokens, `repeats` times over,
    that has at least `length` tokens in all: a line of dashes is no loop."""

    FIELDS: ClassVar[Mapping[str, Kind]] = {
        "period": Integer(1, 4096), "repeats": Integer(2, 4096), "length": Integer(0, 1 << 20),
    }  # fmt: skip

    period: int = 32
    repeats: int = 8
    length: int = 0

    def __post_init__(self) -> None:
        for name, kind in self.FIELDS.items():
            kind.check(f"repetition_detector.{name}", getattr(self, name))

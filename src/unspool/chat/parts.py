"""The parts of an answer, as they stream."""

from __future__ import annotations

from unspool.records import record


@record(frozen=True)
class Content:
    """Text outside calls."""

    text: str


@record(frozen=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@record(frozen=True)
class Begin:
    """A call begins; its arguments follow."""

    index: int
    name: str


@record(frozen=True)
class Arguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Part = Content | Reasoning | Begin | Arguments

"""The parts of an answer, as they are told while it streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text outside calls."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class Begin:
    """A call begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Part = Content | Reasoning | Begin | Arguments

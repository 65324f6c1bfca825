"""What a check reports: the fault, what a user would notice of it, how certain it is, and how to fix it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
Certainty = Literal["certain", "likely", "possible"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # most serious first


@dataclass(frozen=True)
class Finding:
    code: str  # a stable name for programs: "end-token-missing"
    severity: Severity  # error: answers are wrong or never end; warning: they may be; note: worth knowing
    certainty: Certainty
    title: str
    effect: str  # what a user would notice
    fix: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def by_severity(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))

"""Doctor: find in a model's files what makes it misbehave, before a user does. `examine` runs every check."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from unspool.doctor import ends, settings, tokens
from unspool.doctor.finding import Finding, by_severity
from unspool.doctor.subject import Subject, open_subject

__all__ = ["Finding", "Subject", "examine", "open_subject", "serious_findings"]

Check = Callable[[Subject], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (*ends.CHECKS, *settings.CHECKS, *tokens.CHECKS)


def examine(
    subject: Subject, *, read_weights: bool = True, progress: Callable[[int, int], None] | None = None
) -> list[Finding]:
    """Every finding, the most serious first. `read_weights` decodes all tensors, which takes seconds a gigabyte."""
    findings = [finding for check in CHECKS for finding in check(subject)]
    if read_weights:
        from unspool.doctor.tensors import check_tensors

        findings += check_tensors(subject, progress)
    return by_severity(findings)


def serious_findings(subject: Subject) -> list[Finding]:
    """The errors that can be found without decoding a weight: cheap enough for every load."""
    return [finding for check in (*ends.CHECKS, *settings.CHECKS) for finding in check(subject)
            if finding.severity == "error"]  # fmt: skip

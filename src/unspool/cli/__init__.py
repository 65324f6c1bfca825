"""The command line: one file a command."""

from __future__ import annotations


def main() -> int:
    raise SystemExit("unspool: the command line is not wired yet")

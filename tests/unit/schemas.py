"""Checks that what commands print as JSON is what docs/schemas says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


def validate(name: str, value: Any) -> Any:
    """`value` as JSON would carry it, once docs/schemas/NAME.json accepts it."""
    value = json.loads(json.dumps(value))
    jsonschema.validate(value, json.loads((SCHEMAS / f"{name}.json").read_text("utf-8")))
    return value

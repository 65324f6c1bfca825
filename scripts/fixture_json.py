"""JSON that a diff can read: objects are spread over lines, a list of numbers stays on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def render(value: Any, indent: int = 0) -> str:
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        rows = [f"{pad}{json.dumps(key)}: {render(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + pad[1:] + "}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(pad + render(item, indent + 1) for item in value) + "\n" + pad[1:] + "]"
    return json.dumps(value, ensure_ascii=False)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(render(value) + "\n", encoding="utf-8")

"""The docs' tables of fields, from the tables that requests are checked with.

python -m unspool.server.fieldtable          print them
python -m unspool.server.fieldtable FILE     put them between the marks in FILE
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from unspool.server.endpoints import ENDPOINTS
from unspool.server.fields import EXTRA
from unspool.server.kinds import Schema, treatment

WORDS = {"honoured": "honoured", "inert": "accepted: cannot change an answer", "refused": "**refused**"}
MARKS = ("<!-- fields -->\n", "<!-- /fields -->")


def tables() -> str:
    parts = []
    for path, endpoint in ENDPOINTS.items():
        body = endpoint.schema
        same = next(other.path for other in ENDPOINTS.values() if other.schema is body)
        if same != path:
            parts.append(f"### {path}\n\nThe fields of [{same}](#{same.replace('/', '')}).\n")
            continue
        own = {name: field for name, field in body["properties"].items() if name not in EXTRA}
        ours = [name for name in body["properties"] if name in EXTRA]
        more = f"\nand {len(ours)} of [our own](#our-own-fields).\n" if len(ours) > 5 else ""
        parts.append(f"### {path}\n\n{_table(own, body['required'])}{more}")
    parts.append(f"### Our own fields\n\n{_table(EXTRA, [])}")
    return "\n" + "\n".join(parts) + "\n"


def _table(fields: dict[str, Schema], required: list[str]) -> str:
    rows = ["| field | here | values |", "|---|---|---|"]
    for name, field in fields.items():
        here = WORDS[treatment(field)]
        values = "" if treatment(field) == "refused" else _values(field)
        about = field.get("description", "")
        text = " ".join(filter(None, [values + ("." if values and about else ""), about]))
        must = " (required)" if name in required else ""
        rows.append(f"| `{name}`{must} | {here} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def _values(field: Schema) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_values(one) for one in field["anyOf"]))
    if "const" in field:
        return f"`{_json(field['const'])}` alone"
    if "enum" in field:
        return ", ".join(f"`{_json(value)}`" for value in field["enum"])
    if field.get("type") == "array":
        most = f", at most {field['maxItems']}" if "maxItems" in field else ""
        return f"a list of {_values(field['items']) or 'anything'}{most}"
    if field.get("type") == "object" and field.get("properties"):
        taken = [name for name, one in field["properties"].items() if treatment(one) != "refused"]
        return "{" + ", ".join(taken) + "}"
    low, high, above = (field.get(word) for word in ("minimum", "maximum", "exclusiveMinimum"))
    least = f"from {low:,}" if low is not None else f"above {above:,}" if above is not None else ""
    most = f"to {high:,}" if high is not None else ""
    return " ".join(filter(None, [field.get("type", "anything"), least, most]))


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


def main(arguments: list[str]) -> None:
    if not arguments:
        print(tables())
        return
    path = Path(arguments[0])
    text = path.read_text("utf-8")
    before, after = (re.escape(mark) for mark in MARKS)
    changed = re.sub(f"({before}).*?({after})", lambda found: found[1] + tables() + found[2], text, flags=re.DOTALL)
    path.write_text(changed, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

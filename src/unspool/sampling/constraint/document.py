"""A JSON Schema as it was given: read strictly, its draft known, its local references followed."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from unspool import strict_json
from unspool.sampling.constraint.limits import Limits, Place, Refused

_DRAFTS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
LATEST = 2020


class Document:
    """`draft` is a number that grows: 4, 6, 7, 2019, 2020."""

    def __init__(self, value: Any, limits: Limits) -> None:
        self.root = _read(value, limits)
        self.draft = LATEST
        if isinstance(self.root, dict) and "$schema" in self.root:
            uri = self.root["$schema"]
            known = _DRAFTS.get(uri.removesuffix("#")) if isinstance(uri, str) else None
            if known is None:
                raise Refused(f"{uri!r} is not a known draft; known: {', '.join(_DRAFTS)}", ("$schema",))
            self.draft = known
        self._anchors: dict[str, list[tuple[Any, Place]]] | None = None
        self._id_keyword = "id" if self.draft == 4 else "$id"
        self._base = ""
        if isinstance(self.root, dict) and isinstance(self.root.get(self._id_keyword), str):
            self._base = self.root[self._id_keyword].partition("#")[0]

    def check_identity(self, node: dict[str, Any], place: Place) -> None:
        """A subschema with an address of its own would change what references inside it mean."""
        if place and isinstance(node.get(self._id_keyword), str):
            raise Refused("a subschema with an address of its own is not supported", (*place, self._id_keyword))

    def resolve(self, reference: Any, place: Place) -> tuple[Any, Place]:
        """The schema that a `$ref` means, and where it stands."""
        if not isinstance(reference, str):
            raise Refused(f"is {reference!r}; a string is needed", place)
        address, _, fragment = reference.partition("#")
        if address and address != self._base:
            raise Refused(f"{reference!r} is outside this schema; only references within it are supported", place)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchored(fragment, reference, place)
        node, target = self.root, ()  # type: tuple[Any, Place]
        for part in fragment.split("/")[1:]:
            key: str | int = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and part.isascii() and part.isdigit() and int(part) < len(node):
                key = int(part)
            elif not isinstance(node, dict) or key not in node:
                raise Refused(f"{reference!r} leads nowhere", place)
            node = node[key]
            target = (*target, key)
            if isinstance(node, dict):
                self.check_identity(node, target)
        return node, target

    def _anchored(self, name: str, reference: str, place: Place) -> tuple[Any, Place]:
        if self.draft < 2019:
            raise Refused(f"{reference!r} names an anchor; draft {self.draft} references are supported by path", place)
        if self._anchors is None:
            self._anchors = {}
            _collect(self.root, (), self._anchors)
        found = self._anchors.get(name, [])
        if len(found) != 1:
            raise Refused(f"{reference!r} leads to {len(found) or 'no'} places", place)
        return found[0]


def _collect(node: Any, place: Place, found: dict[str, list[tuple[Any, Place]]]) -> None:
    """Every `$anchor`, by name."""
    if isinstance(node, dict):
        if isinstance(node.get("$anchor"), str):
            found.setdefault(node["$anchor"], []).append((node, place))
        for key, child in node.items():
            if key not in ("enum", "const", "default", "examples"):
                _collect(child, (*place, key), found)
    elif isinstance(node, list):
        for number, child in enumerate(node):
            _collect(child, (*place, number), found)


def _read(value: Any, limits: Limits) -> Any:
    """The schema as plain JSON values, whatever it was given as; nothing that JSON cannot say gets through."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
        if size > limits.max_bytes:
            raise Refused(f"the schema has {size:,} bytes; at most {limits.max_bytes:,} are accepted")
        return strict_json.loads(text)
    except UnicodeEncodeError as error:
        raise Refused("the schema holds half a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise Refused(f"the schema nests deeper than {limits.max_depth} subschemas") from error
    except (TypeError, ValueError) as error:
        raise Refused(f"the schema is not JSON: {error}") from error

"""A JSON Schema as it was given: read strictly, its references followed within it."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote, urljoin

from unspool import strict_json
from unspool.sampling.constraint.limits import Limits, Place, Refused

_DRAFT_4 = "http://json-schema.org/draft-04/"
_TOO_OLD = tuple(f"http://json-schema.org/draft-0{number}/" for number in (0, 1, 2, 3))
_CONSTANTS = ("enum", "const", "default", "example", "examples")  # what looks like a schema in them is none

Found = tuple[Any, Place]


class Document:
    """A schema's values, each with the address that its references are relative to (`$id`, in draft 4 `id`)."""

    def __init__(self, value: Any, limits: Limits) -> None:
        self.root = _read(value, limits)
        dialect = self.root.get("$schema") if isinstance(self.root, dict) else None
        dialect = dialect if isinstance(dialect, str) else ""
        if dialect.startswith(_TOO_OLD):
            raise Refused(f"{dialect!r} is older than draft 4, the oldest that is supported", ("$schema",))
        self._id_keyword = "id" if dialect.startswith(_DRAFT_4) else "$id"
        self._resources: dict[str, Found] = {"": (self.root, ())}
        self._anchors: dict[tuple[str, str], list[Found]] = {}
        self._addresses: dict[int, str] = {}  # by the identity of an object in the document
        self._index()

    def holds(self, node: dict[str, Any]) -> bool:
        """Whether this very object stands in the document."""
        return id(node) in self._addresses

    def resolve(self, node: dict[str, Any], place: Place) -> Found:
        """The schema that the `$ref` of a node means, and where it stands."""
        reference, place = node["$ref"], (*place, "$ref")
        if not isinstance(reference, str):
            raise Refused(f"is {reference!r}; a string is needed", place)
        address, _, fragment = reference.partition("#")
        home = self._addresses.get(id(node), "")
        address = _joined(home, address, place) if address else home
        if address not in self._resources:
            raise Refused(f"{reference!r} is outside this schema; only references within it are supported", place)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((address, fragment), [])
            if len(found) != 1:
                raise Refused(f"{reference!r} leads to {len(found) or 'no'} places", place)
            return found[0]
        return self._pointed(self._resources[address], fragment, reference, place)

    @staticmethod
    def _pointed(start: Found, pointer: str, reference: str, place: Place) -> Found:
        node, target = start
        for part in pointer.split("/")[1:]:
            key: str | int = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and part.isascii() and part.isdigit() and int(part) < len(node):
                key = int(part)
            elif not isinstance(node, dict) or key not in node:
                raise Refused(f"{reference!r} leads nowhere", place)
            node = node[key]
            target = (*target, key)
        return node, target

    def _index(self) -> None:
        pending: list[tuple[Any, Place, str]] = [(self.root, (), "")]
        while pending:
            node, place, address = pending.pop()
            if isinstance(node, dict):
                address = self._address(node, place, address)
                self._addresses[id(node)] = address
                pending += [(child, (*place, key), address) for key, child in node.items() if key not in _CONSTANTS]
            elif isinstance(node, list):
                pending += [(child, (*place, number), address) for number, child in enumerate(node)]

    def _address(self, node: dict[str, Any], place: Place, address: str) -> str:
        """The address of what is inside this object; its names are noted."""
        own = node.get(self._id_keyword)
        names = [node.get("$anchor"), node.get("$dynamicAnchor")]
        if isinstance(own, str):
            whole, _, name = own.partition("#")
            if whole:
                address = _joined(address, whole, (*place, self._id_keyword))
                self._resources.setdefault(address, (node, place))
            names.append(name)
        if not place:  # the document is found without its address too
            self._resources[address] = (node, place)
        for name in dict.fromkeys(name for name in names if isinstance(name, str) and name):
            self._anchors.setdefault((address, name), []).append((node, place))
        return address


def _joined(address: str, own: str, place: Place) -> str:
    try:
        return urljoin(address, own)
    except ValueError as error:
        raise Refused(f"is no address: {error}", place) from error


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

"""Reads schemas as claims about one value: every keyword becomes a fact, a further claim, or a choice.

What is not a keyword of some draft is an annotation. Keywords count in every draft: what one draft does not know is an
annotation there, and enforcing it only narrows. `negation` says what a schema that must fail means.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from unspool.sampling.constraint import formats, numbers
from unspool.sampling.constraint.constants import Scalars, constant_schema, constants
from unspool.sampling.constraint.document import Document
from unspool.sampling.constraint.facts import (
    Choice,
    Claim,
    Facts,
    Goal,
    Key,
    ListRule,
    MemberRule,
    types_of,
)
from unspool.sampling.constraint.limits import Budget, Limits, Place, Refused
from unspool.sampling.constraint.negation import Excluded, NotPattern, OfType, failing
from unspool.sampling.constraint.rendering import Terminal, string_terminal
from unspool.sampling.constraint.unions import Unions

# Keywords that constrain and are not enforced, with what to write instead.
UNSUPPORTED = {
    "contains": "",
    "minContains": "",
    "maxContains": "",
    "unevaluatedProperties": "write additionalProperties",
    "unevaluatedItems": "write items",
    "$dynamicRef": "write $ref",
    "$recursiveRef": "write $ref",
}
_SPEAKING = {
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "object": {
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties"),
        *("maxProperties", "dependencies", "dependentRequired", "dependentSchemas"),
    },
}
_SPOKEN = {
    keyword: frozenset({"integer", "fraction"} if name == "number" else {name})
    for name, keywords in _SPEAKING.items()
    for keyword in keywords
}
_MEMBER_KEYWORDS = ("properties", "patternProperties", "additionalProperties", "required")
_DEPENDENT = ("dependencies", "dependentRequired", "dependentSchemas")


class Own(NamedTuple):
    """What a claim's node says itself, as a step of following the claim."""

    claim: Claim


class Reader:
    """One document's claims, read into facts."""

    def __init__(self, document: Document, limits: Limits, budget: Budget) -> None:
        self.document = document
        self._limits = limits
        self._budget = budget
        self._unions = Unions(document, budget)
        self._made: dict[tuple[int, str], Any] = {}  # nodes that stand in no document, so that each has one identity
        self._terminals: dict[tuple[str, bool], Terminal] = {}
        self._checked: set[int] = set()
        self.is_circular = False  # whether, in the last question, a claim needed itself

    # ---- conjunctions

    def ways(self, goal: Goal, place: Place) -> list[Facts]:
        """All conjunctions that satisfy the goal, without choices left. Empty where nothing does."""
        self.is_circular = False
        start = Facts(place)
        if not self._follow(start, goal, frozenset()):
            return []
        pending, found = [start], []
        while pending:
            facts = pending.pop()
            if not facts.choices:
                found.append(facts)
            else:
                choice, facts.choices = facts.choices[0], facts.choices[1:]
                pending += [way for option in reversed(choice.options) if (way := self._taken(facts, option, choice))]
            if len(pending) + len(found) > self._limits.max_ways:
                raise Refused(
                    f"anyOf, oneOf, if, not and dependent keywords multiply to more than {self._limits.max_ways:,} "
                    "ways in which a value can satisfy this",
                    place,
                )
        return found

    def _taken(self, facts: Facts, option: Goal, choice: Choice) -> Facts | None:
        way = facts.copy()
        self._budget.spend(10 + len(way.seen))
        return way if self._follow(way, option, choice.path) else None

    def _follow(self, facts: Facts, goal: Goal, path: frozenset[Key]) -> bool:
        """Add claims and all that they refer to. False where no value can satisfy them: they contradict each other, or
        one needs itself."""
        above: dict[Key, None] = dict.fromkeys(path)
        stack: list[tuple[Iterator[Claim | Own], Key | None]] = [(iter(goal), None)]
        while stack:
            step = next(stack[-1][0], None)
            if step is None:
                key = stack.pop()[1]
                if key is not None:
                    above.pop(key, None)
            elif isinstance(step, Own):
                if not self._add(facts, step.claim, above):
                    return False
            elif step.key in above:
                self.is_circular = True
                return False
            elif step.key not in facts.seen:
                self._budget.spend()
                facts.seen.add(step.key)
                above[step.key] = None
                stack.append((iter(self._steps(step)), step.key))
        return bool(facts.possible_types)

    def _steps(self, claim: Claim) -> list[Claim | Own]:
        """What a claim is made of, in the order in which it speaks of members."""
        node, place = claim.node, claim.place
        if isinstance(node, bool):
            return [] if node is claim.holds else [Own(claim)]
        if not isinstance(node, dict):
            if isinstance(node, Scalars | NotPattern | Excluded | OfType):
                return [Own(claim)]
            raise Refused(f"is {node!r:.80}; a schema is an object or a boolean", place)
        self._check(claim)
        if not claim.holds:
            return [Own(claim)]
        joined: list[Claim | Own] = []
        for key in node:
            if key == "$ref":
                target, where = self.document.resolve(node, place)
                joined.append(Claim(target, where))
            elif key == "allOf":
                joined += self.options(claim, key)
            elif key == "not":
                joined.append(claim._replace(node=node[key], place=(*place, key), holds=False, depth=claim.depth + 1))
        first = next((key for key in node if key in (*_MEMBER_KEYWORDS, "$ref", "allOf")), "")
        return [*joined, Own(claim)] if first in ("$ref", "allOf") else [Own(claim), *joined]

    def _check(self, claim: Claim) -> None:
        if id(claim.node) in self._checked:
            return
        self._checked.add(id(claim.node))
        if len(self._checked) > self._limits.max_nodes:
            raise Refused(f"the schema has more than {self._limits.max_nodes:,} subschemas", claim.place)
        if claim.depth > self._limits.max_depth:
            raise Refused(f"the schema nests deeper than {self._limits.max_depth} subschemas", claim.place)
        for key in claim.node:
            if key in UNSUPPORTED:
                hint = f"; {UNSUPPORTED[key]}" if UNSUPPORTED[key] else ""
                raise Refused(f"the keyword {key!r} is not supported{hint}", (*claim.place, key))

    # ---- one node

    def _add(self, facts: Facts, claim: Claim, above: dict[Key, None]) -> bool:
        """What a node says itself, beside what it refers to. `above`: the claims that led to it."""
        node, place = claim.node, claim.place
        match node:
            case bool():
                return False
            case Scalars(values=values):
                known = facts.values
                facts.values = values if known is None else tuple(v for v in known if numbers.is_among(v, values))
                return True
            case OfType(types=types):
                facts.allow(types)
                return True
            case Excluded(values=values):
                facts.excluded += values
                return True
            case NotPattern(pattern=pattern):
                facts.other_strings += (self.terminal(pattern, place).wide,)
                return True
        if not claim.holds:
            options = failing(self, claim)
            facts.choices += (Choice(options, frozenset(above)),)
            return bool(options)
        self._add_scalars(facts, node, place)
        self._add_items(facts, claim)
        self._add_members(facts, claim)
        facts.spoken |= frozenset().union(*(_SPOKEN.get(key, frozenset()) for key in node))
        choices = list(self._choices(claim))
        if choices:
            path = frozenset(above)
            self._budget.spend(len(path))
            facts.choices += tuple(Choice(options, path) for options in choices)
        return True

    def _add_scalars(self, facts: Facts, node: dict[str, Any], place: Place) -> None:
        if "type" in node:
            facts.allow(types_of(node["type"], (*place, "type")))
        low, high = numbers.bounds(node, place)
        if low is not None:
            facts.at_least("low", low)
        if high is not None:
            facts.at_most("high", high)
        if "multipleOf" in node:
            facts.multiples |= {numbers.divisor(node["multipleOf"], (*place, "multipleOf"), self._limits)}
            facts.is_binary |= isinstance(node["multipleOf"], float)
        least, most = self.range(node, "Length", place)
        facts.at_least("min_length", least)
        if most is not None:
            facts.at_most("max_length", most)
        if "pattern" in node:
            facts.strings += (self.terminal(node["pattern"], (*place, "pattern")).narrow,)
        form = node.get("format")
        if isinstance(form, str) and form in formats.STRINGS:
            facts.strings += (self.terminal(formats.STRINGS[form], (*place, "format"), whole=True).narrow,)
            facts.spoken |= {"string"}

    def _add_items(self, facts: Facts, claim: Claim) -> None:
        node, place, depth = claim.node, claim.place, claim.depth + 1
        first = "prefixItems" if "prefixItems" in node else "items" if isinstance(node.get("items"), list) else ""
        rest = "additionalItems" if first == "items" else "items"
        if first or rest in node:
            listed = node.get(first, [])
            if first and (not isinstance(listed, list) or (first == "prefixItems" and not listed)):
                raise Refused("needs a list of at least one schema", (*place, first))
            if isinstance(node.get(rest), list):
                raise Refused("is a list beside prefixItems", (*place, rest))
            heads = tuple(Claim(item, (*place, first, number), True, depth) for number, item in enumerate(listed))
            tail = Claim(node[rest], (*place, rest), True, depth) if rest in node else None
            facts.items += (ListRule(heads, tail),)
            if tail is not None and tail.node is False:
                facts.at_most("max_items", len(heads))
        least, most = self.range(node, "Items", place)
        facts.at_least("min_items", least)
        if most is not None:
            facts.at_most("max_items", most)
        unique = node.get("uniqueItems", False)
        if not isinstance(unique, bool):
            raise Refused(f"is {unique!r}; true or false is needed", (*place, "uniqueItems"))
        if unique:
            facts.unique = (*place, "uniqueItems")

    def _add_members(self, facts: Facts, claim: Claim) -> None:
        node, place, depth = claim.node, claim.place, claim.depth + 1
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise Refused("needs a list of names", (*place, "required"))
        if any(key in node for key in _MEMBER_KEYWORDS):
            named = mapping(node, "properties", place)
            count = max(len(named), len(required))
            if count > self._limits.max_properties:
                raise Refused(f"{count:,} properties; at most {self._limits.max_properties:,} are accepted", place)
            patterns = mapping(node, "patternProperties", place)
            if len(patterns) > self._limits.max_patterns:
                most = f"at most {self._limits.max_patterns} are accepted"
                raise Refused(f"{len(patterns):,} patterns; {most}", (*place, "patternProperties"))
            rest = (*place, "additionalProperties")
            rule = MemberRule(
                {
                    name: child if isinstance(child, Claim) else Claim(child, (*place, "properties", name), True, depth)
                    for name, child in named.items()
                },
                tuple(
                    (self.terminal(pattern, at), Claim(child, at, True, depth))
                    for pattern, child in patterns.items()
                    for at in [(*place, "patternProperties", pattern)]
                ),
                Claim(node[rest[-1]], rest, True, depth) if rest[-1] in node else None,
                self.document.holds(node) and ("properties" in node or bool(required)),
            )
            facts.members += (rule,)
            facts.required += tuple(name for name in required if name not in facts.required)
        if "propertyNames" in node:
            facts.names += (Claim(node["propertyNames"], (*place, "propertyNames"), True, depth),)
        least, limit = self.range(node, "Properties", place)
        facts.at_least("min_members", least)
        if limit is not None:
            facts.at_most("max_members", limit)

    # ---- choices

    def _choices(self, claim: Claim) -> Iterator[tuple[Goal, ...]]:
        node, place = claim.node, claim.place
        for key in ("const", "enum"):
            if key in node:
                yield self._constants(node, key, claim)
        if "anyOf" in node:
            yield tuple((option,) for option in self.options(claim, "anyOf"))
        if "oneOf" in node:
            yield self._one_of(claim)
        if "if" in node and ("then" in node or "else" in node):
            test, then, other = (self._child(claim, key) for key in ("if", "then", "else"))
            yield ((test, then), (test._replace(holds=False), other))
        for key in _DEPENDENT:
            for name, child in mapping(node, key, place).items():
                here = (*place, key, name)
                if isinstance(child, list):
                    if not all(isinstance(other, str) for other in child) or key == "dependentSchemas":
                        raise Refused("needs a list of names", here)
                    then = self.made(child, "required", {"required": [name, *child]})
                    rest: Goal = ()
                elif key == "dependentRequired":
                    raise Refused("needs a list of names", here)
                else:
                    then = self.made(node, f"required {name}", {"required": [name]})
                    rest = (Claim(child, here, True, claim.depth + 1),)
                absent = self.made(node, f"absent {name}", {"properties": {name: False}})
                yield ((Claim(absent, here),), (Claim(then, here), *rest))

    def _child(self, claim: Claim, key: str) -> Claim:
        return Claim(claim.node.get(key, True), (*claim.place, key), True, claim.depth + 1)

    def options(self, claim: Claim, key: str) -> list[Claim]:
        value, place = claim.node[key], (*claim.place, key)
        if not isinstance(value, list) or not value:
            raise Refused("needs a list of at least one schema", place)
        return [Claim(option, (*place, number), True, claim.depth + 1) for number, option in enumerate(value)]

    def _one_of(self, claim: Claim) -> tuple[Goal, ...]:
        """Each option with the failure of all others that may hold too."""
        options = self.options(claim, "oneOf")
        clashes = self._unions.overlaps([option.node for option in options], (*claim.place, "oneOf"))
        ways: list[Goal] = []
        for number, option in enumerate(options):
            others = [other._replace(holds=False) for index, other in enumerate(options) if index in clashes[number]]
            ways.append((option, *others))
        return tuple(ways)

    def _constants(self, node: dict[str, Any], key: str, claim: Claim) -> tuple[Goal, ...]:
        """An enum: its scalars together, each of its arrays and objects as a schema of its own."""
        values, place = constants(node, key, claim.place, self._limits)
        scalars = tuple(value for value in values if not isinstance(value, list | dict))
        ways: list[Goal] = []
        if scalars:
            ways.append((Claim(self.made(node, f"{key} scalars", Scalars(scalars)), place),))
        for number, value in enumerate(values):
            if isinstance(value, list | dict):
                schema = self.made(node, f"{key} {number}", constant_schema(value))
                ways.append((Claim(schema, (*place, number) if key == "enum" else place),))
        return tuple(ways)

    # ---- help

    def made(self, owner: Any, name: str, node: Any) -> Any:
        """A node that stands in no document; for one owner and name it is always the same one."""
        return self._made.setdefault((id(owner), name), node)

    def terminal(self, pattern: Any, place: Place, *, whole: bool = False) -> Terminal:
        if not isinstance(pattern, str):
            raise Refused(f"is {pattern!r}; a string is needed", place)
        key = pattern, whole
        if key not in self._terminals:
            try:
                self._terminals[key] = string_terminal(pattern, whole=whole, limits=self._limits)
            except Refused as refused:
                raise Refused(str(refused), place) from None
        return self._terminals[key]

    def range(self, node: dict[str, Any], noun: str, place: Place) -> tuple[int, int | None]:
        """minNoun and maxNoun."""
        found: list[int | None] = []
        for name in (f"min{noun}", f"max{noun}"):
            value = node.get(name)
            if value is not None or name in node:
                if isinstance(value, float) and value.is_integer():
                    value = int(value)
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise Refused(f"is {value!r}; a whole number of at least 0 is needed", (*place, name))
            found.append(value)
        low, high = found[0] or 0, found[1]
        if low > self._limits.max_count:
            raise Refused(f"is {low:,}; at most {self._limits.max_count:,} is accepted", (*place, f"min{noun}"))
        return low, None if high is None else min(high, self._limits.max_count)


def mapping(node: dict[str, Any], key: str, place: Place) -> dict[str, Any]:
    value = node.get(key, {})
    if not isinstance(value, dict):
        raise Refused(f"is {value!r:.80}; an object is needed", (*place, key))
    return value

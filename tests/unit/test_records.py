"""Records are dataclasses: the same behaviour, made faster."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any, ClassVar

import pytest

from unspool.records import FEW, record


def make(decorator: Any, **options: Any) -> Any:
    @decorator(**options)
    class Point:
        x: int
        y: list[int] = field(default_factory=list)
        z: int = 3
        hidden: int = field(default=0, repr=False, compare=False)
        limit: ClassVar[int] = 9

        @property
        def total(self) -> int:
            return self.x + self.z

    return Point


OPTIONS: list[dict[str, Any]] = [
    {"frozen": frozen, "slots": slots, "eq": eq}
    for frozen in (True, False)
    for slots in (True, False)
    for eq in (True, False)
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_record_behaves_as_the_dataclass(options: dict[str, Any]) -> None:
    ours, theirs = make(record, **options), make(dataclass, **options)
    for point in (ours, theirs):
        one = point(1, z=4)
        assert repr(one).endswith("Point(x=1, y=[], z=4)")
        assert (one == point(1, z=4)) is options["eq"]
        assert (one == point(1, z=4, hidden=7)) is options["eq"]
        assert one != point(2, z=4)
        assert one != (1, [], 4)
        assert dataclasses.replace(one, x=5).total == 9
        assert dataclasses.asdict(one) == {"x": 1, "y": [], "z": 4, "hidden": 0}
        assert [each.name for each in dataclasses.fields(point)] == ["x", "y", "z", "hidden"]
        assert copy.copy(one).x == copy.deepcopy(one).x == 1
        with pytest.raises(TypeError):
            point()
        if options["frozen"]:
            for name in ("x", "z", "other"):
                with pytest.raises((FrozenInstanceError, TypeError)):
                    setattr(one, name, 1)
            with pytest.raises((FrozenInstanceError, TypeError)):
                del one.x
        else:
            one.x = 6
            assert one.x == 6


@record(frozen=True)
class Base:
    a: int
    b: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "b", self.b + self.a)


@record(frozen=True, slots=True)
class Slotted:
    a: tuple[int, ...]


@record(frozen=True)
class Derived(Base):
    c: str = "c"


@record
class Mutable:
    a: int


@pytest.mark.parametrize("options", OPTIONS)
def test_objects_are_made_alike_before_and_after_their_init_is_compiled(options: dict[str, Any]) -> None:
    point = make(record, **options)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((), {}, "missing 1 required positional argument: 'x'"),
        ((1, [], 2, 3, 4), {}, "takes from 2 to 5 positional arguments but 6 were given"),
        ((1,), {"x": 2}, "multiple values for argument 'x'"),
        ((1,), {"w": 2}, "unexpected keyword argument 'w'"),
    ]
    for number in range(2 * FEW):
        one = point(number, z=4)
        assert (one.x, one.y, one.z, one.hidden, one.total) == (number, [], 4, 0, number + 4)
        assert one.y is not point(1).y, "each has a list of its own"
    signature = inspect.signature(point)
    assert list(signature.parameters) == ["x", "y", "z", "hidden"]
    assert signature.parameters["z"].default == 3
    for count in (0, 2 * FEW):
        fresh = make(record, **options)
        for number in range(count):
            fresh(number)
        for values, named, message in wrong:
            with pytest.raises(TypeError, match=re.escape(message)):
                fresh(*values, **named)


def test_a_record_without_a_doc_string_has_none() -> None:
    assert Base.__doc__ is None
    assert Base.__annotations__ == {"a": "int", "b": "int"}
    assert [each.type for each in dataclasses.fields(Derived)] == ["int", "int", "str"]


def test_hashes_are_those_of_values() -> None:
    assert hash(Base(1)) == hash(Base(1))
    assert len({Slotted((1,)), Slotted((1,)), Slotted((2,))}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(Mutable(1))


def test_records_inherit_and_fields_can_be_changed_after_construction_only_on_purpose() -> None:
    derived = Derived(1)
    assert (derived.a, derived.b, derived.c) == (1, 3, "c")
    assert derived != Base(1)
    assert repr(derived) == "Derived(a=1, b=3, c='c')"
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'b'"):
        derived.b = 3  # type: ignore[misc]


def test_records_can_be_copied_between_processes() -> None:
    for one in (Derived(1), Slotted((1, 2)), Mutable(4)):
        assert pickle.loads(pickle.dumps(one)) == one

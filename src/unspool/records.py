"""`record`: `dataclasses.dataclass` whose classes are made in a fifth of the time.

A dataclass compiles up to six methods for each class. A first token waits for more than a hundred classes, so a record
compiles `__init__` alone and shares the others; with plain dataclasses `unspool bench startup` takes 20 ms longer.
Records are dataclasses: `fields`, `replace` and `asdict` work, and type checkers see `dataclass`. Assigning fields of a
frozen record takes longer, so what is made for every step of an engine is a dataclass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:
    from dataclasses import FrozenInstanceError, dataclass

    def record(cls=None, /, *, frozen=False, eq=True, repr=True, slots=False, kw_only=False, init=True):
        def make(cls):
            own = cls.__dict__
            made = dataclass(cls, init=init, repr=False, eq=False, slots=slots, kw_only=kw_only)
            if repr and "__repr__" not in own:
                made.__repr__ = _repr
            if eq and "__eq__" not in own:
                made.__eq__ = _eq
                if "__hash__" not in own or own["__hash__"] is None:
                    made.__hash__ = _hash if frozen else None
            if frozen:
                made.__setattr__, made.__delattr__ = _set_once, _no_delete
            return made

        return make if cls is None else make(cls)

    def _repr(self) -> str:
        shown = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in _fields(self) if each.repr)
        return f"{type(self).__qualname__}({shown})"

    def _eq(self, other) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return _compared(self) == _compared(other)

    def _hash(self) -> int:
        return hash(_compared(self))

    def _set_once(self, name: str, value: object) -> None:
        """What `__init__` assigns is accepted; nothing after it is."""
        if name not in self.__dataclass_fields__ or _is_set(self, name):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def _no_delete(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _is_set(self, name: str) -> bool:
        """Whether the object itself has a value; a class attribute is only the field's default."""
        if name in getattr(self, "__dict__", ()):
            return True
        slot = getattr(type(self), name, None)
        if not hasattr(slot, "__set__"):
            return False
        try:
            slot.__get__(self)
        except AttributeError:
            return False
        return True

    def _fields(self) -> list:
        return [each for each in self.__dataclass_fields__.values() if each._field_type.name == "_FIELD"]

    def _compared(self) -> tuple:
        return tuple(getattr(self, each.name) for each in _fields(self) if each.compare)

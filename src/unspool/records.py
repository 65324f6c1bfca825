"""`record`: `dataclasses.dataclass` whose classes are made in a tenth of the time.

A dataclass compiles up to six methods for each class. A first token waits for more than a hundred classes, and most of
them make few objects or none. So a record compiles `__init__` alone, once some objects were made, and shares the other
methods; with plain dataclasses `unspool bench startup` takes 25 ms longer. Records are dataclasses: `fields`,
`replace` and `asdict` work, and type checkers see `dataclass`. Objects of a frozen record are made as fast as others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:
    from dataclasses import MISSING, FrozenInstanceError, dataclass
    from functools import partial

    FEW = 24  # objects, whose fields are set one by one in the time that compiling takes
    _set = object.__setattr__

    class _Factory:
        """The default of a field that has a factory, as a signature shows it."""

        def __repr__(self):
            return "<factory>"

    FACTORY = _Factory()

    def record(cls=None, /, *, frozen=False, eq=True, repr=True, slots=False, kw_only=False, init=True):
        def make(cls):
            own, has_doc = cls.__dict__, cls.__doc__ is not None
            if not has_doc:
                cls.__doc__ = "-"  # or dataclass would write one, from the signature that it asks for
            made = dataclass(cls, init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)
            if not has_doc:
                made.__doc__ = None
            if init:
                made.__init__ = _Init(made, frozen)
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

    class _Init:
        """Stands for the `__init__` of a record until enough objects were made that compiling it pays, or until the
        class is asked for it."""

        def __init__(self, cls, frozen):
            self._cls, self._frozen, self._num_made = cls, frozen, 0
            self._order = None

        def __get__(self, one, owner=None):
            self._num_made += 1
            if one is None or self._num_made > FEW:
                return self._compiled().__get__(one, owner)
            if self._order is None:
                self._note_fields()
            return partial(self._fill, one)

        def _note_fields(self):
            """Remember which fields arguments set, and what the others are set to."""
            fields = _fields(self._cls)
            self._named = {each.name for each in fields if each.init}
            self._has_post_init = hasattr(self._cls, "__post_init__")
            self._defaults = [(each.name, each.default) for each in fields if each.default is not MISSING]
            makers = (each for each in fields if each.default_factory is not MISSING)
            self._makers = [(each.name, each.default_factory) for each in makers]
            optional = {name for name, _ in (*self._defaults, *self._makers)}
            self._num_set = len(self._named | optional)  # __post_init__ sets the others
            # The last: while it is None, `__get__` comes here.
            self._order = [each.name for each in fields if each.init and not each.kw_only]

        def _compiled(self):
            cls = self._cls
            if cls.__dict__["__init__"] is self:
                cls.__init__ = _compile_init(cls, self._frozen)
            return cls.__dict__["__init__"]

        def _fill(self, one, *values, **named):
            """What the compiled one does, which is also the one that says what is wrong with arguments."""
            given = dict(zip(self._order, values, strict=False))
            is_wrong = len(values) > len(self._order)
            if named:
                is_wrong = is_wrong or not self._named.issuperset(named) or not given.keys().isdisjoint(named)
                given.update(named)
            for name, value in self._defaults:
                if name not in given:
                    given[name] = value
            for name, make in self._makers:
                if name not in given:
                    given[name] = make()
            if is_wrong or len(given) != self._num_set:
                self._compiled()(one, *values, **named)  # raises
            for name, value in given.items():
                _set(one, name, value)
            if self._has_post_init:
                one.__post_init__()

    def _compile_init(cls, frozen):
        """`__init__(self, …)`, which sets each field and calls `__post_init__`."""
        parameters, named, body, scope = [], [], [], {"_set": _set}
        for place, each in enumerate(_fields(cls)):
            value = each.name
            default = ""
            if each.default is not MISSING:
                scope[f"_default{place}"] = each.default
                default = f"=_default{place}"
            elif each.default_factory is not MISSING:
                scope[f"_make{place}"], scope["_none"] = each.default_factory, FACTORY
                default = "=_none"
                value = f"_make{place}() if {each.name} is _none else {each.name}" if each.init else f"_make{place}()"
            if each.init:
                (named if each.kw_only else parameters).append(each.name + default)
            elif not default:
                continue  # __post_init__ sets it
            elif each.default is not MISSING:
                value = f"_default{place}"
            body.append(f"_set(self, {each.name!r}, {value})" if frozen else f"self.{each.name} = {value}")
        if hasattr(cls, "__post_init__"):
            body.append("self.__post_init__()")
        signature = ", ".join(["self", *parameters, *(["*", *named] if named else [])])
        exec(f"def __init__({signature}) -> None:\n " + "\n ".join(body or ["pass"]), scope)
        made = scope["__init__"]
        made.__qualname__ = f"{cls.__qualname__}.__init__"
        made.__annotations__ = {each.name: each.type for each in _fields(cls) if each.init}
        made.__module__ = cls.__module__
        return made

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

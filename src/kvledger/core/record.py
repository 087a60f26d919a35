"""Record: what leaves the library by value, such as a spec, a step's output or an account.

Engines send records between processes, keep copies and compare them. A native class would allow none of that: pickle
and copy look for attributes where it has none, and nobody may set those that never change. So a record says how it is
made again: by its class, from the attributes that __match_args__ names, and from the rest of what it has.

A frozen dataclass is a record too. It leaves eq and repr to this class: making them anew for each takes half of the
time in which the library is imported.
"""

from typing import ClassVar

from mypy_extensions import mypyc_attr


@mypyc_attr(acyclic=True, allow_interpreted_subclasses=True)
class Record:
    """Equal where class and content are; pickle, copy and deepcopy give an equal one.

    `__match_args__`: arguments of the constructor in order, each an attribute of the same name. All other attributes
    can be set, and have a value after the constructor.
    """

    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __reduce__(self) -> tuple[object, ...]:
        arguments = tuple([getattr(self, name) for name in type(self).__match_args__])
        rest = _rest(self)
        return (type(self), arguments, rest) if rest else (type(self), arguments)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Record) and type(self) is type(other) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        """Of records that never change; TypeError where a part can."""
        return hash(self.__reduce__())

    def __repr__(self) -> str:
        texts = [f"{name}={getattr(self, name)!r}" for name in type(self).__match_args__]
        texts.extend([f"{name}={value!r}" for name, value in _rest(self).items() if not name.startswith("_")])
        return f"{type(self).__name__}({', '.join(texts)})"


def _rest(record: Record) -> dict[str, object]:
    """Attributes that are no arguments of the constructor."""
    arguments = type(record).__match_args__
    # A compiled class lists its attributes; what an interpreted one has, also as a subclass, is in __dict__.
    names = [*getattr(record, "__mypyc_attrs__", ()), *getattr(record, "__dict__", ())]
    return {name: getattr(record, name) for name in names if name not in arguments and name != "__dict__"}


def refuse_copy(what: object, instead: str) -> TypeError:
    """The error for copies of what belongs to a ledger."""
    return TypeError(f"a {type(what).__name__} cannot be copied or pickled, it belongs to its ledger: {instead}")

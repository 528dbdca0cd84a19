"""What a method does that lasts beyond it, and whether another method undoes that."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache

from auditor.project.code.modules import Class, Function
from auditor.project.pools.bodies import returns_something
from auditor.project.shapes.changes import UNDONE_BY, Change, Did, all_changes
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.registers import LISTENERS
from auditor.project.shapes.ways import MODULE, SELF, Helpers
from auditor.protocols.vocabulary import undoes

_INTO_A_FIELD = re.compile(r"\bin (?:\w+\()?self\.(\w+)|self\.(\w+)\[")

UNDONE = UNDONE_BY | {
    Did.CLEAR: frozenset({Did.IN}),
    Did.SET: frozenset({Did.CLEAR}),
    Did.OUT: UNDONE_BY[Did.OUT] | {Did.SET},
}
"""What is free may be marked, as well as what is in use; `slot.host = host`, of a slot among others; `head =
head.next`, and `head = node` of a node that is told."""


class Lasting:
    """Of the methods of one class; each is read once, however many pairs it may be half of."""

    def __init__(self, family: Callable[[], Iterable[Class]] = tuple) -> None:
        """`family` is asked for once anybody wants to know: bases lie in other files."""
        self._family = family
        self._known: dict[Function, list[Change]] = {}

    @cached_property
    def helpers(self) -> Helpers:
        """Their own methods, the first one's before those of its bases."""
        family = reversed([*self._family()])
        return Helpers({name: each for one in family for name, each in one.methods.items()})

    def of(self, method: Function) -> list[Change]:
        if method not in self._known:
            self._known[method] = list(_lasting(method, self.helpers))
        return self._known[method]


def _lasting(method: Function, helpers: Helpers) -> Iterator[Change]:
    """What it does to its object, to what that leads to, and to what it is told of. Who takes a lock and
    leaves it, holds it for himself."""
    found = list(all_changes(method, helpers))
    left = {change.way for change in found if change.did is Did.LEFT}
    held = {change.way for change in found if change.did is Did.HELD}
    told = own_parameters(method)
    for change in found:
        inside = change.did in (Did.HELD, Did.LEFT) and change.way in left & held
        lasts = change.way[0] in (SELF, MODULE, *told) and len(change.way) > 1
        if lasts and not inside:
            yield change


def undoing(
    begins: Function, begun: Sequence[Change], end: Function, ended: Sequence[Change]
) -> list[Change]:
    """Those that undo something, to the same thing; `slot.worn = False` of a slot that it is told, to one out
    of `self.slots`."""
    told = own_parameters(end)
    named = undoes(end.name, begins.name) and returns_something(begins)  # what is heard by a number, is lent
    by_last: dict[str, list[Change]] = {}
    for one in begun:
        by_last.setdefault(one.way[-1], []).append(one)
    return [
        other
        for other in ended
        if other.way[-1] in by_last and (named or not LISTENERS.search(other.way[-1]))
        if any(
            (one.way == other.way or other.way[0] in told)
            and other.did in UNDONE.get(one.did, ())
            and (one.within is None or other.within is None or one.within is other.within)
            and (one.did is not Did.SET or _is_of_several(begins, one))
            and (other.did is not Did.SET or _is_from_told(end, other))
            and not (one.did is Did.OUT and _is_told(begins, one) and not _is_told(end, other))
            for one in by_last[other.way[-1]]
        )
    ]


def _is_of_several(begins: Function, change: Change) -> bool:
    """`slot.host = host` of a slot out of `self.slots`, into which its class looks."""
    if begins.cls is None or len(change.way) <= 2:
        return False
    return change.way[1] in _looked_into(begins.cls.text)


@lru_cache(maxsize=1 << 6)
def _looked_into(text: str) -> frozenset[str]:
    return frozenset(one or other for one, other in _INTO_A_FIELD.findall(text))


def _is_from_told(method: Function, change: Change) -> bool:
    """`self.holes = merged`, of the holes and of the one that it is told."""
    return isinstance(change.value, ast.Name) and field_work(method).is_from_told(change.value)


def _is_told(method: Function, change: Change) -> bool:
    """`drop(key)` strikes the key off, and `propose(key)` enters something new: that gives nothing back."""
    return isinstance(change.value, ast.Name) and change.value.id in own_parameters(method)

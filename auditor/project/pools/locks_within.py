"""Methods that hold a lock of their own object for whoever calls them: `lock()` and `unlock()` around
`self._mutex`, or around the lock of a key in a table."""

import ast
import re
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.modules import Function

TAKING = frozenset({"acquire", "lock", "wait"})
LEAVING = frozenset({"release", "unlock", "signal"})
_LOCKS = re.compile(r"(?:Lock|Semaphore|Mutex|Condition)\b")


def locks_through(function: Function, partners: Sequence[Function]) -> bool:
    """It takes a lock in a field, and does not leave it, and a partner leaves the same one."""
    taken = set(_places(function, TAKING)) - set(_places(function, LEAVING))
    return bool(taken) and any(not taken.isdisjoint(_places(partner, LEAVING)) for partner in partners)


def lock_pairs(methods: Sequence[Function]) -> Iterator[tuple[Function, Function]]:
    """`begin_io(key)` takes the lock that `end_io(key)` leaves: whatever they are called, it stays taken
    between them."""
    text = methods[0].cls.text if methods and methods[0].cls is not None else ""
    if _LOCKS.search(text) is None:
        return
    methods = [each for each in methods if not each.name.startswith("__")]
    leaving = [each for each in methods if set(_places(each, LEAVING)) - set(_places(each, TAKING))]
    for begins in methods if leaving else ():
        for ends in leaving:
            if locks_through(begins, [ends]):
                yield begins, ends


def _places(function: Function, ways: frozenset[str]) -> Iterator[str]:
    """A lock is told nothing when it is left: whoever gives something back is a pool."""
    for call in function.calls:
        left = call.args and ways is LEAVING
        if isinstance(call.func, ast.Attribute) and call.func.attr in ways and function.owner and not left:
            yield from _place(function, call.func.value)


def _place(function: Function, lock: ast.expr) -> Iterator[str]:
    """The field, or the helper, through which its object has a lock: `self._locks` of `self._locks[key]`,
    `self._lock_for()` of `lock = self._lock_for(key)`."""
    owner = function.owner or ""
    match lock:
        case ast.Attribute() if field := own_attribute(lock, owner):
            yield field
        case (
            ast.Subscript(value=table)
            | ast.Call(func=ast.Attribute(value=table, attr="get" | "setdefault" | "pop"))
        ) if not (isinstance(table, ast.Name) and table.id == owner):
            yield from _place(function, table)
        case ast.Call(func=ast.Attribute() as called) if helper := own_attribute(called, owner):
            yield f"{helper}()"
        case ast.Name(id=name):
            for value in given_to(function, name):
                if not isinstance(value, ast.Name):
                    yield from _place(function, value)

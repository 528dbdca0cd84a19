"""Methods that hold a lock of their own object for whoever calls them: `lock()` and `unlock()` around
`self._mutex`."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function

TAKING = frozenset({"acquire", "lock", "wait"})
LEAVING = frozenset({"release", "unlock", "signal"})


def locks_through(function: Function, partners: list[Function]) -> bool:
    """It takes a lock in a field, and does not leave it, and a partner leaves the same one."""
    taken = set(_fields(function, TAKING)) - set(_fields(function, LEAVING))
    return any(not taken.isdisjoint(_fields(partner, LEAVING)) for partner in partners)


def _fields(function: Function, ways: frozenset[str]) -> Iterator[str]:
    for call in function.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in ways and function.owner is not None:
            field = own_attribute(call.func.value, function.owner)
            if field is not None:
                yield field

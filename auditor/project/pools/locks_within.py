"""Methods that hold a lock of their own object for whoever calls them: `lock()` and `unlock()` around
`self._mutex`, or around the lock of a key in a table."""

import ast
import re
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assignments, given_to, own_attribute
from auditor.project.code.modules import Function, last_part

TAKING = frozenset({"acquire", "lock", "wait"})
LEAVING = frozenset({"release", "unlock", "signal"})
WAITING = frozenset({"wait", "wait_for"})
WAKING = frozenset({"notify", "notify_all"})
_LOCKS = re.compile(r"(?:Lock|Semaphore|Mutex|Condition)\b")


def locks_through(function: Function, partners: Sequence[Function]) -> bool:
    """It takes a lock in a field, and does not leave it, and a partner leaves the same one."""
    taken = set(_places(function, TAKING)) - set(_places(function, LEAVING))
    return bool(taken) and any(not taken.isdisjoint(_places(partner, LEAVING)) for partner in partners)


def lock_pairs(methods: Sequence[Function]) -> Iterator[tuple[Function, Function]]:
    """`begin_io(key)` takes the lock that `end_io(key)` leaves: whatever they are called, it stays taken
    between them. Who starts what leaves it himself owes nothing."""
    text = methods[0].cls.text if methods and methods[0].cls is not None else ""
    if _LOCKS.search(text) is None:
        return
    methods = [each for each in methods if not each.name.startswith("__")]
    leaving = [each for each in methods if set(_places(each, LEAVING)) - set(_places(each, TAKING))]
    for begins in methods if leaving else ():
        for ends in leaving:
            if locks_through(begins, [ends]) and not begins.calling(ends.name):
                yield begins, ends


def gates(methods: Sequence[Function]) -> Iterator[tuple[Function, Function]]:
    """`write_lock()` waits until nobody writes and sets `self._writing`, or says no where somebody does;
    `write_unlock()` takes that back and wakes whoever waits."""
    if not methods or methods[0].cls is None or "notify" not in methods[0].cls.text:
        return
    waiting = [
        each
        for each in methods
        if _says_no(each) or any(last_part(call.func) in WAITING for call in each.calls)
    ]
    waking = [each for each in methods if any(last_part(call.func) in WAKING for call in each.calls)]
    for begins in waiting:
        for ends in waking:
            if ends is not begins and not set(_set_to(begins, True)).isdisjoint(_set_to(ends, False)):
                yield begins, ends


def _says_no(method: Function) -> bool:
    """`if self._writing: return False`"""
    return any(
        isinstance(node, ast.If)
        and isinstance(last := node.body[-1], ast.Return)
        and isinstance(last.value, ast.Constant)
        and last.value.value is False
        for node in method.statements
    )


def _set_to(function: Function, truth: bool) -> Iterator[str]:
    """Fields of its object that it asks for as well, if it sets them to True."""
    for target, value in assignments(function):
        field = own_attribute(target, function.owner or "")
        if field is None or not (isinstance(value, ast.Constant) and value.value is truth):
            continue
        asked = any(
            own_attribute(node, function.owner or "") == field and isinstance(node.ctx, ast.Load)
            for node in function.nodes
            if isinstance(node, ast.Attribute)
        )
        if asked or not truth:
            yield field


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

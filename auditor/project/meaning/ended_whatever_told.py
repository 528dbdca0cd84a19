"""Locks that are left whatever their end is told: `version = gate.begin_update()` says which version comes
next, and `gate.end_update(None)` that it does not come. The lock is left either way."""

import ast

from auditor.project.code.bindings import assignments, awaited, given_to, own_attribute
from auditor.project.code.modules import Function, last_part
from auditor.project.meaning.recognise import Recogniser
from auditor.project.pools.locks_within import LEAVING, TAKING

LOCKS = frozenset({"Lock", "RLock"})


def ends_whatever_it_is_told(
    recogniser: Recogniser, function: Function, call: ast.Call, begun: ast.Call, protocol: str
) -> bool:
    """Both are methods of one object, which has one lock that the one takes and the other leaves."""
    match begun.func, call.func:
        case ast.Attribute(value=one), ast.Attribute(value=other) if ast.dump(one) == ast.dump(other):
            pass
        case _:
            return False
    if any(_is_of_another(function, told, begun) for told in call.args):
        return False
    beginning, ending = (recogniser.calls.targets(function, each)[0] for each in (begun, call))
    if len(beginning) != 1 or len(ending) != 1 or not recogniser.ends(ending[0], protocol):
        return False
    taken = {lock for each in beginning[0].calls if (lock := _lock(beginning[0], each, TAKING)) is not None}
    return not taken.isdisjoint(_left_for_sure(ending[0]))


def _is_of_another(function: Function, told: ast.expr, begun: ast.Call) -> bool:
    """What it is told came out of another call like this one: that one is ended."""
    values = given_to(function, told.id) if isinstance(told, ast.Name) else ()
    inner = map(awaited, values)
    return any(
        isinstance(each, ast.Call) and each is not begun and ast.dump(each.func) == ast.dump(begun.func)
        for each in inner
    )


def _left_for_sure(method: Function) -> set[str]:
    """By one of its own statements, that no test stands before."""
    statements = method.node.body if isinstance(method.node.body, list) else []
    if any(isinstance(node, ast.Return) for node in method.statements):
        return set()
    calls = (each.value for each in statements if isinstance(each, ast.Expr))
    return {
        lock
        for call in calls
        if isinstance(call, ast.Call) and not call.args and (lock := _lock(method, call, LEAVING)) is not None
    }


def _lock(method: Function, call: ast.Call, ways: frozenset[str]) -> str | None:
    """`self._lock.release()`, of a lock and of no semaphore: that counts what is left of a pool."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ways or method.owner is None:
        return None
    name = own_attribute(call.func.value, method.owner)
    return name if name is not None and _is_made_a_lock(method, name) else None


def _is_made_a_lock(method: Function, name: str) -> bool:
    methods = method.cls.methods.values() if method.cls is not None else ()
    return any(
        isinstance(value, ast.Call) and last_part(value.func) in LOCKS
        for each in methods
        for target, value in assignments(each)
        if own_attribute(target, each.owner or "") == name
    )

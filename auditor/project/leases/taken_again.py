"""Locks that a function gives back for a while and takes again: `self._lock.release()`, waits, and
`self._lock.acquire()` in the end. Whoever had it before has it again, and ends it."""

import ast

from auditor.project.code.modules import Function
from auditor.protocols.vocabulary import LEASE_METHODS


def taken_again(function: Function, acquire: ast.Call) -> bool:
    """The first that is asked of this lock is to give it back, and nothing behind the acquire is."""
    if not isinstance(acquire.func, ast.Attribute):
        return False
    asked = sorted(_asked(function, ast.dump(acquire.func.value)))
    before = [name for at, name in asked if at < _at(acquire)]
    after = [name for at, name in asked if at > _at(acquire)]
    return bool(before) and _gives_back(before[0]) and not any(map(_gives_back, after))


def _asked(function: Function, lock: str) -> list[tuple[tuple[int, int], str]]:
    return [
        (_at(call), call.func.attr)
        for call in function.calls
        if isinstance(call.func, ast.Attribute) and ast.dump(call.func.value) == lock
    ]


def _at(call: ast.Call) -> tuple[int, int]:
    return call.lineno, call.col_offset


def _gives_back(name: str) -> bool:
    return name.strip("_") in LEASE_METHODS

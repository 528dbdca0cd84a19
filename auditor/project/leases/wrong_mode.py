"""A lock that is held in one mode, and given back in another.

    self._rw.acquire_read()
    rows = list(self._rows)
    self._rw.release_write()

Such a lock may be its caller's to give back, but whoever ends a mode that was not begun here means this one.
So does a class that holds a lock of its own in two modes, and only ever ends one of them.
"""

import ast
import re
from collections.abc import Iterable, Set

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name


def ended_in_another_mode(
    function: Function, recogniser: Recogniser, begun: ast.Call, protocol: str, ends: Set[str]
) -> bool:
    """Behind `begun` the function ends a mode more often than it begins that."""
    if _of(function, begun, ends):
        return False
    others = _of(function, begun, recogniser.begins_of_other_modes(protocol))
    wrong = _of(function, begun, recogniser.ends_of_other_modes(protocol))
    return len([call for call in wrong if call.lineno > begun.lineno]) > len(others)


def ended_by_no_method(
    family: Iterable[Function], recogniser: Recogniser, begun: ast.Call, protocol: str, ends: Set[str]
) -> bool:
    """Of `self.table.lock_write()`, where the class ends `self.table` in its other modes alone, and nobody
    else has to do with its lock."""
    field = getattr(getattr(begun.func, "value", None), "attr", "")
    asked = {last_name(call) for each in family for call in each.calls if _is_asked(call, each, field)}
    others = recogniser.ends_of_other_modes(protocol)
    forgotten = not others.isdisjoint(asked) and ends.isdisjoint(asked)
    return forgotten and not _ended_from_outside(recogniser.calls.model.project, field, ends)


def _is_asked(call: ast.Call, method: Function, field: str) -> bool:
    match call.func:
        case ast.Attribute(value=lock):
            return own_attribute(lock, method.owner or "") == field
    return False


def _ended_from_outside(project: Project, field: str, ends: Set[str]) -> bool:
    """`update.table.unlock_write()`"""
    return any(
        re.search(rf"(?<!\bself)\.{field}\.{end}\(", text)
        for end in ends
        for _, text in project.mentioning(f".{field}.{end}(")
    )


def _of(function: Function, begun: ast.Call, names: Set[str]) -> list[ast.Call]:
    """Calls of these names on the same lock."""
    lock = ast.unparse(begun.func.value) if isinstance(begun.func, ast.Attribute) else ""
    return [
        call
        for name in names
        for call in function.calling(name)
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == lock
    ]

"""Methods that give back what a field holds only to put another one in its place: `switch(name)`. They end
all but the last, which is for the exit of the object to end."""

import ast
from collections.abc import Sequence, Set

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function, last_part
from auditor.project.fields.exits import begins_always, calls_with, ends_itself


def without_refillers(
    names: Sequence[str], family: Sequence[Function], filler: Function, call: ast.Call, field: str,
    ends: Set[str],
) -> list[str]:  # fmt: skip
    """Of the methods that end what is in the field, by calls of such names, those that do not fill it again
    each time."""
    ending = {method.name: method for method in family if method.qualname in names}
    if ending.get(filler.name) is not filler or not _fills_each_time(filler, call, field, ends):
        return list(names)
    called = {
        name: {own_attribute(call.func, each.owner or "") for call in each.calls} & ending.keys()
        for name, each in ending.items()
        if not _ends(each, field, ends)
    }
    refilling = {filler.name}
    for _ in ending:  # `get` calls `switch`, and `load` calls `get`
        refilling |= {name for name, others in called.items() if others and others <= refilling}
    gone = {ending[name].qualname for name in refilling}
    return [name for name in names if name not in gone]


def _fills_each_time(filler: Function, call: ast.Call, field: str, ends: Set[str]) -> bool:
    """Once it has given the last one back it does not return before it has asked for another."""
    ending = _ends(filler, field, ends)
    if not ending or not begins_always(filler, call, field):
        return False
    first = min(each.lineno for each in ending)
    leaving = (node.lineno for node in filler.nodes if isinstance(node, ast.Return))
    return not any(first <= line < call.lineno for line in leaving)


def _ends(method: Function, field: str, ends: Set[str]) -> list[ast.Call]:
    """`self.pool.release(self.field)`, `self.field.close()`"""
    own = method.owner or ""
    given = [call for call in calls_with(method, field) if last_part(call.func) in ends]
    return [*given, *(call for call in method.calls if ends_itself(call, own, field))]

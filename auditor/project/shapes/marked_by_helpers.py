"""Places that a method has marked by another one of its object: `self._set(place)`."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import own_attribute, told_by_position
from auditor.project.code.modules import Function
from auditor.project.shapes.markings import Mark, Marking, marked_by
from auditor.project.shapes.pool_state import own_parameters
from auditor.source.nodes import walk

FEW = 4
"""So many statements a method has that does little else."""


def marked_by_helper(method: Function, call: ast.Call) -> Iterator[Marking]:
    """What the call marks of the object's fields, where the helper marks the place that it is told."""
    helper = _own_method(method, call)
    if helper is None or helper.owner is None or len(helper.statements) > FEW:
        return
    told = list(own_parameters(helper))
    for mark in _marks(helper):
        field = _field(mark.container, helper.owner)
        places = {node.id for node in walk(mark.place) if isinstance(node, ast.Name)} & {*told}
        for at, given in told_by_position(call) if field is not None and len(places) == 1 else ():
            if at in places or (isinstance(at, int) and places == {*told[at : at + 1]}):
                yield Marking(field or "", given, mark.on, mark.bit, mark.value)


def _field(container: ast.expr, own: str) -> str | None:
    """`bits` of `self.bits`, and of `self.bits[place >> 3]`."""
    return own_attribute(container.value if isinstance(container, ast.Subscript) else container, own)


def _own_method(method: Function, call: ast.Call) -> Function | None:
    if method.cls is None or method.owner is None:
        return None
    helper = method.cls.methods.get(own_attribute(call.func, method.owner) or "")
    return helper if helper is not method else None


def _marks(helper: Function) -> Iterator[Mark]:
    for statement in helper.statements:
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.Delete):
            yield from marked_by(statement)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield from marked_by(statement.value)

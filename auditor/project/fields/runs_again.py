"""Methods that say by one of their fields that they run more than once for an object."""

import ast
from collections.abc import Sequence

from auditor.project.code.bindings import assigned_by, assignments, own_attribute, suites_of
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling
from auditor.project.fields.forgetting import CLOSING
from auditor.project.meaning.sites import last_name


def reckons_with_another_turn(filling: Filling, enders: Sequence[Function]) -> bool:
    """`if self.buffer is None: self.buffer = self.pool.take()` beside a store of what `take()` lends: the
    method runs more than once for an object, unless one of its ends comes after each run and leaves the
    buffer there."""
    method, own = filling.method, filling.owner
    lent = _called(getattr(filling.statement, "value", None))
    suites = [suite for suite in suites_of(method.node) if filling.statement in suite]
    asked = {
        other
        for suite in suites
        for node in suite
        if lent and (other := _filled_if_empty(node, own, lent)) not in (None, filling.field)
    }
    last = all(CLOSING.fullmatch(ender.name) for ender in enders)
    return any(last or all(_empties(ender, other) for ender in enders) for other in asked)


def _filled_if_empty(node: ast.stmt, own: str, lent: str) -> str | None:
    match node:
        case ast.If(
            test=ast.Compare(left=asked, ops=[ast.Is()], comparators=[ast.Constant(value=None)]), body=body
        ):
            other = own_attribute(asked, own)
            filled = (to for each in body for to, value in assigned_by(each) if _called(value) == lent)
            return other if any(own_attribute(to, own) == other for to in filled) else None
    return None


def _empties(ender: Function, field: str | None) -> bool:
    return any(
        own_attribute(to, ender.owner or "") == field
        and isinstance(value, ast.Constant)
        and value.value is None
        for to, value in assignments(ender)
    )


def _called(value: ast.expr | None) -> str:
    value = value.value if isinstance(value, ast.Await) else value
    return last_name(value) if isinstance(value, ast.Call) else ""

"""Methods that say by one of their fields that they run more than once for an object."""

import ast

from auditor.project.code.bindings import assigned_by, own_attribute, suites_of
from auditor.project.fields.filling_again import Filling
from auditor.project.meaning.sites import last_name


def reckons_with_another_turn(filling: Filling) -> bool:
    """`if self.buffer is None: self.buffer = self.pool.take()` beside a store of what `take()` lends: the
    method runs more than once for an object."""
    method, own = filling.method, filling.owner
    lent = _called(getattr(filling.statement, "value", None))
    suites = [suite for suite in suites_of(method.node) if filling.statement in suite]
    return bool(lent) and any(
        _fills_an_empty_one(node, own, filling.field, lent) for suite in suites for node in suite
    )


def _fills_an_empty_one(node: ast.stmt, own: str, field: str, lent: str) -> bool:
    match node:
        case ast.If(
            test=ast.Compare(left=asked, ops=[ast.Is()], comparators=[ast.Constant(value=None)]), body=body
        ):
            other = own_attribute(asked, own)
            filled = (to for each in body for to, value in assigned_by(each) if _called(value) == lent)
            return other not in (None, field) and any(own_attribute(to, own) == other for to in filled)
    return False


def _called(value: ast.expr | None) -> str:
    value = value.value if isinstance(value, ast.Await) else value
    return last_name(value) if isinstance(value, ast.Call) else ""

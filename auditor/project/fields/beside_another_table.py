"""Tables that are filled under the same key together: who looks in one of them has looked in the other."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assigned_by, own_attribute, suites_of
from auditor.project.code.field_paths import mentions
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import LEAVING, Filling, made_of, same
from auditor.project.fields.reckoning import takes_out


def known_beside(filling: Filling, family: Sequence[Function]) -> bool:
    """`if key in self.where: return` above `self.grants[key] = grant; self.where[key] = place`, where whoever
    strikes a key off `where` has to do with `grants` as well."""
    if filling.key is None:
        return False
    return any(
        isinstance(node, ast.If)
        and isinstance(node.body[-1], LEAVING)
        and (node.end_lineno or node.lineno) < filling.line
        and any(_filled_together(filling, table, family) for table in _looked_in(filling, node.test))
        for node in filling.method.statements
    )


def _looked_in(filling: Filling, test: ast.expr) -> Iterator[str]:
    match test:
        case ast.BoolOp(op=ast.Or(), values=values):
            for value in values:
                yield from _looked_in(filling, value)
        case ast.Compare(left=key, ops=[ast.In()], comparators=[table]):
            field = own_attribute(table, filling.owner)
            if field and filling.key is not None and same(made_of(filling.method, key), filling.key):
                yield field


def _filled_together(filling: Filling, other: str, family: Sequence[Function]) -> bool:
    if other == filling.field or other not in _fields_under_the_key(filling):
        return False
    return all(mentions(each, filling.field) for each in family if takes_out(each, other))


def _fields_under_the_key(filling: Filling) -> Iterator[str]:
    """What the statements beside the store put something into under its key."""
    method = filling.method
    for suite in suites_of(method.node):
        for node in suite if filling.statement in suite else ():
            for target, _ in assigned_by(node):
                match target:
                    case ast.Subscript(value=into, slice=key) if (
                        name := own_attribute(into, filling.owner)
                    ) and same(made_of(method, key), filling.key or key):
                        yield name

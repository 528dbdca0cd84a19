"""Where another method of the object moves what lies in a field: `self.ready[group] = self.current`,
`self.current, self.next = self.next, None`; or the same one before it puts another one there,
`self.full.append(self.current)`, `self.current = pool.take()`. What is lost there is lost as well."""

import ast
from collections.abc import Iterator, Sequence

from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.bindings import assigned_by, own_attribute, suites_of
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling
from auditor.project.fields.forgetting import INITIAL

ADDING = frozenset({"append", "appendleft", "add"})


def moved_to(
    family: Sequence[Function], storing: Function, field: str
) -> Iterator[tuple[Function, ast.stmt, Path]]:
    """The method, the statement, and where it lies then; the field is emptied by that method, or gets another
    one right behind that."""
    for method in family:
        own = method.owner
        if own is None or method.name in INITIAL or f".{field}" not in method.text:
            continue
        emptied = any(_is_emptied(node, own, field) for node in method.statements)
        before = {id(node) for node in _before_another(method, own, field)}
        for node in method.statements:
            if id(node) not in before and (not emptied or method is storing):
                continue
            for target, value in assigned_by(node):
                if own_attribute(value, own) == field and (place := _place(target, own)) is not None:
                    yield method, node, place
            match node:
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=into, attr=way), args=[given])):
                    its = way in ADDING and own_attribute(given, own) == field
                    if its and (name := own_attribute(into, own)) is not None:
                        yield method, node, (own, f".{name}", ANY_ITEM)


def _before_another(method: Function, own: str, field: str) -> Iterator[ast.stmt]:
    """Statements with a later one in the same suite that puts what a call answers into the field."""
    for suite in suites_of(method.node):
        filled = [
            at
            for at, node in enumerate(suite)
            for target, value in assigned_by(node)
            if own_attribute(target, own) == field and isinstance(value, ast.Call | ast.Await)
        ]
        yield from suite[: max(filled, default=0)]


def put_over_there(family: Sequence[Function], storing: Function, field: str) -> Iterator[Filling]:
    """Where it comes to lie in another field, of which the method that moves it says nothing else."""
    for method, node, place in moved_to(family, storing, field):
        if len(place) != 2:
            continue
        attribute, own = place[1][1:], method.owner or ""
        spoken = [n for n in method.nodes if isinstance(n, ast.Attribute) and n.attr == attribute]
        if len(spoken) == 1:
            yield Filling(method, own, attribute, node, spoken[0])


def _place(target: ast.expr, own: str) -> Path | None:
    if (name := own_attribute(target, own)) is not None:
        return (own, f".{name}")
    if isinstance(target, ast.Subscript) and (name := own_attribute(target.value, own)) is not None:
        return (own, f".{name}", ANY_ITEM)
    return None


def _is_emptied(node: ast.stmt, own: str, field: str) -> bool:
    return any(
        own_attribute(to, own) == field and isinstance(value, ast.Constant) and value.value is None
        for to, value in assigned_by(node)
    )

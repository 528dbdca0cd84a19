"""Ends that take number 0 for nothing: `if self.slot: self.pool.free(self.slot)`."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assigned_by, own_attribute
from auditor.project.code.modules import Function
from auditor.source.nodes import walk

LEAVING = (ast.Return, ast.Continue)
LOOPS = (ast.For, ast.AsyncFor)


def passes_over_zero(method: Function, field: str, entries: bool, calls: Sequence[ast.Call]) -> ast.If | None:
    """The condition on what the field holds, or on one of its `entries`, without which none of these calls is
    made, and which is false of 0."""
    own = method.owner or ""
    names = _names(method, own, field, entries)
    one = "" if entries else field
    asked = {id(call) for call in calls}
    for node in method.statements:
        if not isinstance(node, ast.If):
            continue
        inside = {id(part) for each in node.body for part in walk(each)} & asked
        for part in _together(node.test):
            if inside and _is_it(_truth(part), own, one, names):
                return node
            absent = part.operand if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not) else None
            leaves = isinstance(node.body[-1], LEAVING) and not node.orelse and asked and not inside
            if leaves and absent is not None and _is_it(absent, own, one, names):
                return node
    return None


def _truth(test: ast.expr) -> ast.expr:
    """What `slot` or `slot > 0` asks for."""
    match test:
        case ast.Compare(left=left, ops=[ast.Gt()], comparators=[ast.Constant(value=0)]):
            return left
    return test


def _together(test: ast.expr) -> Iterator[ast.expr]:
    """`self.slot and self.pool`: both have to be true."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for each in test.values:
            yield from _together(each)
    else:
        yield test


def _is_it(node: ast.expr, own: str, field: str, names: set[str]) -> bool:
    return own_attribute(node, own) == field or (isinstance(node, ast.Name) and node.id in names)


def _names(method: Function, own: str, field: str, entries: bool) -> set[str]:
    """What the method calls it, or an entry of it: `for slot in self.slots:`, `slot = self.slots[key]`."""
    given: list[tuple[ast.expr, ast.expr]] = []
    for node in method.statements:
        if not entries:
            given += assigned_by(node)
        elif isinstance(node, LOOPS):
            given.append((_entry(node.target, node.iter), _container(node.iter)))
        else:
            given += [
                (target, entry)
                for target, value in assigned_by(node)
                if (entry := _taken_of(value)) is not None
            ]
    return {
        target.id
        for target, value in given
        if isinstance(target, ast.Name) and own_attribute(value, own) == field
    }


def _entry(target: ast.expr, iterated: ast.expr) -> ast.expr:
    """`slot` of `for key, slot in self.slots.items():`"""
    pairs = isinstance(target, ast.Tuple) and ".items()" in ast.unparse(iterated)
    return target.elts[-1] if pairs and isinstance(target, ast.Tuple) else target


def _container(iterated: ast.expr) -> ast.expr:
    """`self.slots` of `list(self.slots.values())`."""
    match iterated:
        case ast.Call(func=ast.Name(id="list" | "tuple" | "reversed" | "sorted" | "set"), args=[inner]):
            return _container(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="values" | "items" | "copy"), args=[]):
            return inner
    return iterated


def _taken_of(value: ast.expr) -> ast.expr | None:
    """`self.slots` of `self.slots[key]`, `self.slots.pop(key, None)`."""
    match value:
        case ast.Call(func=ast.Attribute(value=inner, attr="get" | "pop" | "popleft")):
            return inner
        case ast.Subscript(value=inner, slice=key) if not isinstance(key, ast.Slice):
            return inner
    return None

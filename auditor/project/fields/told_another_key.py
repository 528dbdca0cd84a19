"""Calls before a table is filled that have to do with another entry of it: `self.cool(old)`, and then
`self.watch[new] = lease`."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def is_told_another_key(
    call: ast.Call, key: ast.expr, told: Sequence[str], field: str, family: Sequence[Function]
) -> bool:
    """Both keys are `told` by the caller, and the method that is called only looks under its own."""
    match call:
        case ast.Call(func=ast.Attribute(attr=name), args=[ast.Name(id=other)], keywords=[]):
            different = isinstance(key, ast.Name) and {key.id, other} <= {*told} and other != key.id
            called = [method for method in family if method.name == name]
            return different and bool(called) and all(_looks_under_it(method, field) for method in called)
    return False


def _looks_under_it(method: Function, field: str) -> bool:
    """All that it does with the field is to take out, or look up, what stands under its first parameter."""
    own, key = method.owner or "", "".join(method.parameters[1:2])
    speaking = [
        n for n in walk(method.node) if isinstance(n, ast.Attribute) and own_attribute(n, own) == field
    ]
    under = [
        table
        for node in method.nodes
        for table, asked in _asked_of(node)
        if own_attribute(table, own) == field and getattr(asked, "id", "") == key
    ]
    return bool(speaking) and len(speaking) == len(under)


def looked_up(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The table, and what is asked for: `key in table`, `table.get(key)`, `table.pop(key, None)`."""
    match node:
        case ast.Call(func=ast.Attribute(value=table, attr="get" | "pop"), args=[asked, *_]):
            yield table, asked
        case ast.Compare(left=asked, ops=[ast.In() | ast.NotIn()], comparators=[table]):
            yield table, asked


def _asked_of(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Subscript):
        yield node.value, node.slice
    yield from looked_up(node)

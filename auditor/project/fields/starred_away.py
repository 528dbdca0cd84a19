"""Entries of tables of which a method names the first one and leaves the others to nobody:
`head, *_ = self.rows.pop(key)`."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function

TAKING = frozenset({"pop", "popleft"})


def starred_away(method: Function, attribute: str) -> Iterator[ast.Assign]:
    for node in method.statements:
        match node:
            case ast.Assign(
                targets=[ast.Tuple(elts=names) | ast.List(elts=names)],
                value=ast.Call(func=ast.Attribute(value=table, attr=way)),
            ) if way in TAKING and own_attribute(table, method.owner or "") == attribute:
                rest = [each.value for each in names if isinstance(each, ast.Starred)]
                if any(isinstance(each, ast.Name) and not _is_read(method, each.id) for each in rest):
                    yield node


def goes_through(method: Function, attribute: str) -> bool:
    """`for crate in self.rows.pop(key):`, so that an entry is a list of as many as there are."""
    for node in method.statements:
        match node:
            case ast.For(
                target=ast.Name(),
                iter=ast.Subscript(value=table)
                | ast.Call(func=ast.Attribute(value=table, attr="pop" | "get")),
            ) if own_attribute(table, method.owner or "") == attribute:
                return True
    return False


def _is_read(method: Function, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in method.nodes
    )

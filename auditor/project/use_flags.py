"""Pools that mark their entries: `entry.in_use = True` when one is handed out, `False` when it is back."""

import ast
from collections.abc import Iterable, Iterator

from auditor.project.bindings import statements_of
from auditor.project.modules import Function

Flag = tuple[str, bool]
"""A field or key of an entry, and what it is set to."""


def marks_an_entry(function: Function, partners: Iterable[Function]) -> bool:
    """It goes over entries, sets a flag of one and hands that out, or a part of it; a partner sets the flag
    back."""
    set_back = {(name, not value) for partner in partners for _, (name, value) in _flags(partner)}
    entries = {entry for entry, flag in _flags(function) if flag in set_back}
    searched = {
        name.id
        for node in statements_of(function.node)
        if isinstance(node, ast.For | ast.AsyncFor)
        for name in ast.walk(node.target)
        if isinstance(name, ast.Name)
    }
    return any(
        isinstance(node, ast.Return) and node.value is not None and _root(node.value) in entries & searched
        for node in statements_of(function.node)
    )


def _flags(function: Function) -> Iterator[tuple[str, Flag]]:
    """`entry.in_use = True`, `entry["in_use"] = True`: the entry's name and the flag."""
    for node in statements_of(function.node):
        match node:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id=entry), attr=flag)],
                value=ast.Constant(value=bool() as value),
            ):
                yield entry, (flag, value)
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id=entry), slice=ast.Constant(value=str() as flag))],
                value=ast.Constant(value=bool() as value),
            ):
                yield entry, (flag, value)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""

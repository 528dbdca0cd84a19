"""Pools that lend rows of plain numbers, bytearrays and lists of floats: a slice of one, or a list made of
it, is a copy, which leads nobody back to what was lent."""

import ast
import re
from collections.abc import Iterator

from auditor.project.code.bindings import given_to, own_attribute, ways
from auditor.project.code.modules import Function, last_part
from auditor.project.pools.lent_kinds import taken_from
from auditor.project.shapes.name_bindings import FILLING

ROW = re.compile(
    r"(?:Optional\[)?(?:bytearray|[Ll]ist\[float\]|(?:array\.)?array(?:\[float\])?)\]?(?: \| None)?"
)
"""Annotations of such a row."""

CONTAINERS = frozenset({"list", "deque"})
ROWS = frozenset({"bytearray", "array"})


def lends_plain_memory(function: Function) -> bool:
    """By its annotation, by what its store was filled with, or by what it makes where that is empty."""
    returns = getattr(function.node, "returns", None)
    if returns is not None:
        return ROW.fullmatch(ast.unparse(returns).strip("'\"")) is not None
    made = [*_in_the_store(function), *_returned(function)]
    return any(map(is_row, made)) and not any(isinstance(each, ast.Tuple) for each in made)


def is_row(made: ast.expr) -> bool:
    """`bytearray(size)`, `[0.0] * size`, `[0.0 for _ in range(size)]`"""
    match made:
        case ast.Call(func=maker):
            return last_part(maker) in ROWS
        case ast.BinOp(op=ast.Mult(), left=ast.List(elts=[ast.Constant(value=int() | float())])):
            return True
        case ast.ListComp(elt=ast.Constant(value=int() | float())):
            return True
    return False


def _returned(function: Function) -> Iterator[ast.expr]:
    for node in function.statements:
        if isinstance(node, ast.Return) and node.value is not None:
            for way in ways(node.value):
                yield way
                yield from given_to(function, way.id) if isinstance(way, ast.Name) else ()


def _in_the_store(function: Function) -> Iterator[ast.expr]:
    """The elements of the lists that the method takes from."""
    owner = function.owner
    if owner is None or function.cls is None:
        return
    taken = {name for call in function.calls if (name := taken_from(call, owner)) is not None}
    for method in function.cls.methods.values() if taken else ():
        for name, element in _elements_put(method):
            if name in taken:
                yield element


def _elements_put(method: Function) -> Iterator[tuple[str, ast.expr]]:
    owner = method.owner or ""
    for node in method.statements:
        match node:
            case (
                ast.Assign(targets=[target], value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ) if (name := own_attribute(target, owner)) is not None:
                yield from ((name, element) for element in _elements(value))
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=field, attr=way), args=[*_, put])) if (
                way in FILLING and (name := own_attribute(field, owner)) is not None
            ):
                yield from ((name, each) for each in (_elements(put) if "extend" in way else [put]))


def _elements(container: ast.expr) -> list[ast.expr]:
    match container:
        case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element):
            return [element]
        case ast.List(elts=elements):
            return elements
        case ast.Call(func=ast.Name(id=name), args=[inner, *_]) if name in CONTAINERS:
            return _elements(inner)
    return []

"""Amounts that are measured once more when they are given back, of something that has become shorter in
between: `budget.claim(len(text))`, `text = text.strip()`, `budget.restore(len(text))`."""

import ast
from collections.abc import Iterator

from auditor.ir.graph import Graph
from auditor.ir.ops import EndStatement
from auditor.source.nodes import walk

SHORTENING = frozenset({"strip", "lstrip", "rstrip", "removeprefix", "removesuffix"})
ONE_OF_EACH = frozenset({"set", "frozenset", "unique"})


def measured_anew(graph: Graph, site: int, amount: ast.expr) -> bool:
    """`len(text)`, written out somewhere below the acquire, is of a shorter one: what it measures has been
    given another meaning in between, that is made of what was there."""
    measured = {*_measured(amount)}
    between = graph.ops[site + 1 :] if site >= 0 and measured else ()
    return any(
        name in measured and _is_shorter(value, name)
        for op in between
        if isinstance(op, EndStatement) and getattr(op.at, "lineno", amount.lineno) < amount.lineno
        for name, value in _named(op.at)
    )


def _named(statement: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match statement:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
        ):
            yield name, value


def _measured(amount: ast.expr) -> Iterator[str]:
    """`text` of `len(text)`, and of `1 + len(text) // 4`."""
    for node in walk(amount):
        match node:
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]):
                yield name
            case ast.Attribute(value=ast.Name(id=name), attr="nbytes"):
                yield name


def _is_shorter(value: ast.expr, name: str) -> bool:
    """It is made of what was there, and may leave out some of it."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr=way)):
            return of == name and way in SHORTENING
        case ast.Subscript(value=ast.Name(id=of), slice=ast.Slice()):
            return of == name
        case ast.ListComp(elt=ast.Name(id=each), generators=[ast.comprehension() as only]):
            over = getattr(only.iter, "id", "") == name and getattr(only.target, "id", "") == each
            return over and bool(only.ifs)
        case ast.Call(func=ast.Name(id="list" | "sorted" | "tuple"), args=[inner]):
            return _is_shorter(inner, name)
        case ast.Call(func=ast.Name(id=way), args=[ast.Name(id=of)]):
            return of == name and way in ONE_OF_EACH
    return False

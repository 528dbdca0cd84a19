"""Leases that a table keeps only if there is none under the key: `return self.spans.setdefault(key, span)`.

Where there is one, theirs is what is returned, and nobody has this one. Not where the method has made sure
before that there is none, unless it has waited since: another task may have been there first."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def lost_to_the_first(function: Function, call: ast.Call) -> Iterator[ast.Call]:
    """The `setdefault` that may drop it."""
    names = {
        target.id
        for target, value in assignments(function)
        if isinstance(target, ast.Name) and (value is call or getattr(value, "value", None) is call)
    }
    for each in function.calls:
        match each:
            case ast.Call(func=ast.Attribute(value=table, attr="setdefault"), args=[_, given]):
                its = given is call or getattr(given, "id", None) in names
                if isinstance(given, ast.Tuple | ast.List | ast.Dict):
                    its = any(_is_it(part, call, names) for part in walk(given))
                    its = its and not any(_is_kept_too(node, given, names) for node in function.nodes)
                if its and not (
                    _is_looked_for(function, table, each) or _is_gone_on_with(function, given, each)
                ):
                    yield each


def _is_it(node: ast.AST, call: ast.Call, names: Set[str]) -> bool:
    return node is call or (isinstance(node, ast.Name) and node.id in names)


def _is_kept_too(node: ast.AST, given: ast.expr, names: Set[str]) -> bool:
    """`self.keys[page] = key`, `self.order.append(page)`: it is found there as well."""
    match node:
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute() as target], value=value):
            parts = [*walk(target), *walk(value)]
        case ast.Call(func=ast.Attribute(attr="append" | "add" | "put" | "setdefault"), args=args):
            parts = [part for each in args if each is not given for part in walk(each)]
        case _:
            return False
    return any(isinstance(part, ast.Name) and part.id in names for part in parts)


def _is_looked_for(function: Function, table: ast.expr, kept: ast.Call) -> bool:
    """The table is spoken of before, and nobody waits in between."""
    text, until = ast.unparse(table), kept.lineno
    before = [
        node.lineno
        for node in function.nodes
        if isinstance(node, ast.Attribute | ast.Name) and node.lineno < until and ast.unparse(node) == text
    ]
    waits = (node.lineno for node in function.nodes if isinstance(node, ast.Await))
    return bool(before) and not any(max(before) < line < until for line in waits)


def _is_gone_on_with(function: Function, given: ast.expr, kept: ast.Call) -> bool:
    """`if kept is not span: pool.put(span)`"""
    later = (node for node in function.nodes if getattr(node, "lineno", 0) > kept.lineno)
    names = {node.id for node in walk(given) if isinstance(node, ast.Name)}
    return any(isinstance(node, ast.Name) and node.id in names for each in later for node in walk(each))

"""Tables that a function asks for a key before it makes something for it."""

import ast

from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def looked_up_before(function: Function, call: ast.Call) -> bool:
    """`table.setdefault(key, made)` in a function that has looked into the table: by `in`, by `get`, or in
    the handler for a key that is not there."""
    if not isinstance(call.func, ast.Attribute):
        return False
    table = ast.dump(call.func.value)
    return any(_asks(node, table) or _handles(node, call) for node in function.nodes)


def _asks(node: ast.AST, table: str) -> bool:
    match node:
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[asked]):
            return ast.dump(asked) == table
        case ast.Call(func=ast.Attribute(value=asked, attr="get")):
            return ast.dump(asked) == table
    return False


def _handles(node: ast.AST, call: ast.Call) -> bool:
    return isinstance(node, ast.ExceptHandler) and any(inner is call for inner in walk(node))

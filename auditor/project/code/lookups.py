"""Tables that a function asks for a key, and what tells that it has one."""

import ast
import re

from auditor.project.code.bindings import assignments
from auditor.project.code.guards import WITHS
from auditor.project.code.modules import Function
from auditor.source.nodes import walk

LOCK = re.compile(r"lock|mutex|cond|sem|guard|latch", re.IGNORECASE)
"""What others wait for meanwhile, by its name."""


def looked_up_before(function: Function, call: ast.Call) -> bool:
    """`table.setdefault(key, made)` in a function that has looked into the table: by `in`, by `get`, or in
    the handler for a key that is not there. What it saw under a lock that it has left since says nothing."""
    if not isinstance(call.func, ast.Attribute):
        return False
    table = ast.dump(call.func.value)
    within = [
        node for node in function.nodes if isinstance(node, WITHS) and _locks(node) and _is_in(node, call)
    ]
    seen = list(walk(within[-1])) if within else function.nodes
    return any(_asks(node, table) or _handles(node, call) for node in seen)


def _locks(block: ast.With | ast.AsyncWith) -> bool:
    return any(LOCK.search(ast.unparse(item.context_expr)) for item in block.items)


def _is_in(block: ast.AST, call: ast.Call) -> bool:
    return any(node is call for node in walk(block))


def _asks(node: ast.AST, table: str) -> bool:
    match node:
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[asked]):
            return ast.dump(asked) == table
        case ast.Call(func=ast.Attribute(value=asked, attr="get")):
            return ast.dump(asked) == table
    return False


def _handles(node: ast.AST, call: ast.Call) -> bool:
    return isinstance(node, ast.ExceptHandler) and _is_in(node, call)


def gives_a_key(function: Function, call: ast.Call) -> bool:
    """`oldest = next(iter(self.table))`, and `self.table.pop(oldest)`: what goes round there are keys."""
    match call:
        case ast.Call(func=ast.Name(id="next"), args=[ast.Call(func=ast.Name(id="iter"), args=[table]), *_]):
            names = {
                target.id
                for target, value in assignments(function)
                if value is call and isinstance(target, ast.Name)
            }
            return any(_stands_under(node, ast.dump(table)) & names for node in function.nodes)
    return False


def _stands_under(node: ast.AST, table: str) -> set[str]:
    """Names by which something is looked up in the table."""
    match node:
        case ast.Subscript(value=asked, slice=ast.Name(id=key)):
            pass
        case ast.Call(func=ast.Attribute(value=asked, attr="pop" | "get"), args=[ast.Name(id=key), *_]):
            pass
        case _:
            return set()
    return {key} if ast.dump(asked) == table else set()


def strikes_off_another(function: Function, call: ast.Call) -> bool:
    """`self.rows.get(key)` in a function with `del self.rows[oldest]`, or `self.rows.popitem()`."""
    if not isinstance(call.func, ast.Attribute):
        return False
    table, asked = ast.dump(call.func.value), list(map(ast.dump, call.args[:1]))
    for node in function.nodes:
        match node:
            case ast.Delete(targets=[ast.Subscript(value=struck, slice=key)]):
                keys = [ast.dump(key)]
            case ast.Call(func=ast.Attribute(value=struck, attr="pop" | "popitem"), args=told):
                keys = list(map(ast.dump, told[:1]))
            case _:
                continue
        if ast.dump(struck) == table and keys != asked:
            return True
    return False

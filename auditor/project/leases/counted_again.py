"""Counted each time, noted once: `views.retain(name)` and then `if name not in frame.textures:
frame.textures.append(name)`. Whoever goes over the names gives back one for each, so that of a name that was
there already one is left over."""

import ast
from collections.abc import Set

from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name

NOTING = frozenset({"append", "appendleft", "add"})


def noted_once(function: Function, call: ast.Call, ends: Set[str]) -> ast.If | None:
    """The question, behind the call, on whose other way nobody notes it, and nothing is given back."""
    if not call.args or any(last_name(each) in ends for each in function.calls):
        return None
    key = ast.unparse(call.args[0])
    for node in function.statements:
        if isinstance(node, ast.If) and node.lineno > call.lineno and not node.orelse:
            box = _asked_for(node.test, key)
            if box is not None and any(_notes(each, box, key) for each in node.body):
                return node
    return None


def _asked_for(test: ast.expr, key: str) -> str | None:
    """`frame.textures` of `name not in frame.textures`."""
    match test:
        case ast.Compare(left=left, ops=[ast.NotIn()], comparators=[ast.Attribute() as box]):
            return ast.unparse(box) if ast.unparse(left) == key else None
    return None


def _notes(statement: ast.stmt, box: str, key: str) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=into, attr=way), args=[what])):
            return way in NOTING and ast.unparse(into) == box and ast.unparse(what) == key
    return False

"""Containers that a method shortens without a look at what goes: `self.held = self.held[:4]`."""

import ast
from collections.abc import Iterator

from auditor.project.bindings import own_attribute, own_name, statements_of
from auditor.project.elsewhere import looks_releasing
from auditor.project.modules import Function

FROM_AN_END = frozenset({"popitem", "popleft", "pop"})
FILLING = frozenset({"append", "appendleft", "add", "insert", "extend"})


def cut_off(method: Function, attribute: str) -> Iterator[ast.stmt]:
    """The statements that do so, in a method that gives nothing back and looks at nothing inside."""
    own = own_name(method)
    if own is None or any(looks_releasing(call) for call in method.calls):
        return
    shortening = [node for node in statements_of(method.node) if _shortens(node, own, attribute)]
    if shortening and not _looks_inside(method, own, attribute, shortening):
        yield from shortening


def _shortens(node: ast.stmt, own: str, attribute: str) -> bool:
    match node:
        case ast.Assign(targets=[target], value=ast.Subscript(value=whole, slice=ast.Slice())):
            return _is(target, own, attribute) and _is(whole, own, attribute)
        case (
            ast.Assign(targets=[ast.Subscript(value=whole, slice=ast.Slice())], value=ast.List(elts=[]))
            | ast.Delete(targets=[ast.Subscript(value=whole, slice=ast.Slice())])
        ):
            return _is(whole, own, attribute)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=whole, attr=way), args=args)):
            return way in FROM_AN_END and _is(whole, own, attribute) and all(map(_is_number, args))
    return False


def _looks_inside(method: Function, own: str, attribute: str, shortening: list[ast.stmt]) -> bool:
    """Beyond asking how much there is, or for what stands under a name, and putting more in."""
    nodes = list(ast.walk(method.node))
    known = {id(each) for statement in shortening for each in ast.walk(statement)}
    for node in nodes:
        match node:
            case (
                ast.Call(func=ast.Name(id="len"), args=[each])
                | ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[each])
            ):
                known.add(id(each))
            case ast.Call(func=ast.Attribute(value=each, attr=way)) if way in FILLING:
                known.add(id(each))
            case ast.Subscript(value=each, ctx=ast.Store()) | ast.Subscript(value=each, slice=ast.Name()):
                known.add(id(each))
    return any(
        isinstance(node, ast.expr) and _is(node, own, attribute) and id(node) not in known for node in nodes
    )


def _is(node: ast.expr, own: str, attribute: str) -> bool:
    return own_attribute(node, own) == attribute


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
    )

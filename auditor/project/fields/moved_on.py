"""Whether a method moves what a table holds under a key elsewhere as a whole: `self.finals[key] =
self.drafts[key]`, so that what the one table loses may lie in the other."""

import ast
from collections.abc import Iterable

from auditor.flow.knowledge import EXTENDING, FILLING
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.in_others import Uses
from auditor.source.nodes import walk

FINDING = frozenset({"get", "pop", "setdefault"})


def moves_on(methods: Iterable[Function], table: str) -> bool:
    """One of these does more with such an entry than to ask for it, or to take single things out of it."""
    return any(_moves_on(each, table) for each in methods)


def _moves_on(method: Function, table: str) -> bool:
    entries = [node for node in method.nodes if isinstance(node, ast.expr) and _finds(node, method, table)]
    names = {
        target.id
        for target, value in assignments(method)
        if isinstance(target, ast.Name) and any(value is each for each in entries)
    }
    entries += [
        node
        for node in method.nodes
        if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load)
    ]
    uses = Uses(method)
    return not all(_only_asks(uses.parents.get(id(each)), each, uses) for each in entries)


def _finds(node: ast.expr, method: Function, table: str) -> bool:
    """`self.drafts[key]`, `self.drafts.get(key)`."""
    match node:
        case ast.Subscript(value=whole, ctx=ast.Load()):
            return own_attribute(whole, method.owner or "") == table
        case ast.Call(func=ast.Attribute(value=whole, attr=way)) if way in FINDING:
            return own_attribute(whole, method.owner or "") == table
    return False


def _only_asks(parent: ast.AST | None, entry: ast.AST, uses: Uses) -> bool:
    match parent:
        case ast.Assign(targets=[ast.Name()]) | ast.If() | ast.While() | ast.Expr() | ast.Compare():
            return True
        case ast.UnaryOp() | ast.BoolOp():
            return _only_asks(uses.parents.get(id(parent)), parent, uses)
        case ast.Attribute(attr="pop" | "popleft") as way:
            return getattr(uses.parents.get(id(way)), "func", None) is way
        case ast.Call(func=ast.Name(id="len" | "bool")):
            return True
        case ast.For(target=ast.Name(id=name), iter=over) if over is entry:
            return not any(_keeps(node, name) for each in parent.body for node in walk(each))
    return False


def _keeps(node: ast.AST, name: str) -> bool:
    """`self.spare.append(page)`, `self.last = page`, of one that a loop comes to."""
    match node:
        case ast.Call(func=ast.Attribute(attr=way), args=args) if way in FILLING | EXTENDING:
            return any(isinstance(part, ast.Name) and part.id == name for each in args for part in walk(each))
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()], value=value):
            return any(isinstance(part, ast.Name) and part.id == name for part in walk(value))
    return False

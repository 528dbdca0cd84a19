"""Amounts that are a part of another one by how they are reckoned: `each` of `each * len(jobs)`, `room` of
`len(prompt) + room`, and how many a filter leaves of a list."""

import ast

from auditor.project.code.bindings import given_to
from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def is_a_part(function: Function, given: ast.expr | None, taken: ast.expr) -> bool:
    """Whether less is given back than was taken, by names that go on to mean the same."""
    if given is None:
        return False
    taken, given = _meant(function, taken), _meant(function, given)
    if ast.unparse(taken) == ast.unparse(given) or _is_made_anew(function, taken):
        return False
    return _is_a_side(given, taken)


def _is_a_side(given: ast.expr, taken: ast.expr) -> bool:
    match taken:
        case ast.BinOp(left=left, op=ast.Mult() | ast.Add(), right=right):
            sides = [ast.unparse(left), ast.unparse(right)]
            return ast.unparse(given) in sides and not {"0", "1"} & set(sides)
    return False


def is_left_of_it(function: Function, given: ast.expr | None, taken: ast.expr) -> bool:
    """`refund(len(leaves))` after `draw(len(nodes))`, of `leaves = [n for n in nodes if not n.children]`."""
    match given, taken:
        case (
            ast.Call(func=ast.Name(id="len"), args=[part]),
            ast.Call(func=ast.Name(id="len"), args=[ast.Name() as whole]),
        ):
            match _meant(function, part):
                case ast.ListComp(generators=[ast.comprehension(iter=ast.Name(id=name), ifs=[_, *_])]):
                    return name == whole.id
    return False


def _meant(function: Function, amount: ast.expr) -> ast.expr:
    """What a name stands for that is bound once."""
    if not isinstance(amount, ast.Name):
        return amount
    bound = [node for node in function.nodes if isinstance(node, ast.Name) and node.id == amount.id]
    values = list(given_to(function, amount.id))
    once = len(values) == 1 and sum(isinstance(node.ctx, ast.Store) for node in bound) == 1
    return values[0] if once and amount.id not in function.parameters else amount


def _is_made_anew(function: Function, taken: ast.expr) -> bool:
    names = {node.id for node in walk(taken) if isinstance(node, ast.Name)}
    stores = [
        node.id for node in function.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return any(stores.count(name) > (name not in function.parameters) for name in names)

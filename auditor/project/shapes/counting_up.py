"""Fields that give out one number after the other."""

import ast


def counts_by_itself(value: ast.expr) -> bool:
    """`itertools.count(1)`."""
    match value:
        case (
            ast.Call(func=ast.Name(id="count"))
            | ast.Call(func=ast.Attribute(value=ast.Name(id="itertools"), attr="count"))
        ):
            return True
    return False


def raised_by(target: ast.Attribute, value: ast.expr) -> ast.expr | None:
    """`1` of `self.next = self.next + 1`."""
    match value:
        case ast.BinOp(left=ast.Attribute() as left, op=ast.Add(), right=ast.Constant() as more):
            return more if ast.unparse(left) == ast.unparse(target) else None
    return None

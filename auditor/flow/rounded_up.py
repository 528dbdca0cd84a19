"""Amounts that are more than was wanted: `padded = (n + step - 1) // step * step`, `n + 1`."""

import ast


def exceeds(amount: ast.expr, wanted: ast.expr) -> bool:
    """Whether an amount is what is wanted and something more, or that rounded up."""
    match amount:
        case ast.BinOp(left=one, op=ast.Add(), right=other):
            return _is_some(other, one, wanted) or _is_some(one, other, wanted)
        case ast.BinOp(left=one, op=ast.Mult(), right=other):
            return _is_rounded(one, other, wanted) or _is_rounded(other, one, wanted)
    return False


def _is_some(more: ast.expr, one: ast.expr, wanted: ast.expr) -> bool:
    """`n + 1`, `n + -n % step`; `n + extra` may be n."""
    counted = isinstance(more, ast.Constant) and isinstance(more.value, int) and more.value > 0
    return _is(one, wanted) and (counted or _fills_up(more, wanted))


def _fills_up(more: ast.expr, wanted: ast.expr) -> bool:
    """`-n % step`, `(-n) % step`"""
    match more:
        case ast.BinOp(left=ast.UnaryOp(op=ast.USub(), operand=each), op=ast.Mod()):
            return _is(each, wanted)
    return False


def _is_rounded(pieces: ast.expr, step: ast.expr, wanted: ast.expr) -> bool:
    """`-(-n // step) * step`, `(n + step - 1) // step * step`, `ceil(n / step) * step`."""
    match pieces:
        case ast.UnaryOp(
            op=ast.USub(),
            operand=ast.BinOp(
                left=ast.UnaryOp(op=ast.USub(), operand=each), op=ast.FloorDiv(), right=divisor
            ),
        ):
            return _is(each, wanted) and _is(divisor, step)
        case ast.BinOp(
            left=ast.BinOp(
                left=ast.BinOp(left=each, op=ast.Add(), right=more),
                op=ast.Sub(),
                right=ast.Constant(value=1),
            ),
            op=ast.FloorDiv(),
            right=divisor,
        ):
            return _is(each, wanted) and _is(more, step) and _is(divisor, step)
        case ast.Call(
            func=ast.Attribute(attr="ceil") | ast.Name(id="ceil"),
            args=[ast.BinOp(left=each, op=ast.Div(), right=divisor)],
        ):
            return _is(each, wanted) and _is(divisor, step)
    return False


def _is(one: ast.expr, other: ast.expr) -> bool:
    return ast.unparse(one) == ast.unparse(other)

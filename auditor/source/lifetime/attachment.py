"""Through which part of an expression a tensor's graph goes on, and which parts cut it off."""

import ast
from collections.abc import Iterator

from auditor.source.lifetime.code import last_name
from auditor.source.lifetime.models import is_loss

# Methods whose result is attached if their receiver is; any other ends what is known.
_GO_ON = frozenset(
    (
        "sum", "mean", "clone", "cpu", "cuda", "to", "float", "double", "half", "squeeze", "unsqueeze",
        "view", "reshape", "abs", "sqrt", "pow", "exp", "log", "neg", "mul", "add", "div", "contiguous",
        "flatten",
    )
)  # fmt: skip
_JOINS = frozenset(("stack", "cat", "concat", "sum", "mean"))
_CUT = frozenset(("data", "grad", "shape", "dtype", "device", "ndim"))


def carriers(node: ast.expr) -> Iterator[ast.expr]:
    """The names, fields and loss calls whose graph the value of `node` hangs on, as far as can be said."""
    match node:
        case ast.Name():
            yield node
        case ast.Attribute(attr=name):
            if name not in _CUT:
                yield node
        case ast.BinOp(left=left, op=ast.Div()):
            yield from carriers(left)  # of how many it is the mean has no graph
        case ast.BinOp(left=left, right=right):
            yield from carriers(left)
            yield from carriers(right)
        case ast.UnaryOp(operand=inner) | ast.Subscript(value=inner) | ast.Starred(value=inner):
            yield from carriers(inner)
        case ast.IfExp(body=body, orelse=orelse):
            yield from carriers(body)
            yield from carriers(orelse)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from carriers(part)
        case ast.Dict(values=parts):
            for part in parts:
                yield from carriers(part)
        case ast.Call():
            yield from _through_call(node)


def _through_call(call: ast.Call) -> Iterator[ast.expr]:
    name = last_name(call.func)
    if isinstance(call.func, ast.Attribute) and name in _GO_ON:
        yield from carriers(call.func.value)
    if name in _JOINS:
        for argument in call.args:
            yield from carriers(argument)
    elif is_loss(call.func) and name not in ("item", "detach", "tolist", "numpy"):
        yield call

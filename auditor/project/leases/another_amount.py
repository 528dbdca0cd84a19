"""`await credits.take(2)` and, on the way out, `credits.give()`: a function that means to give back what it
took, and gives another amount. Nobody else is to see to the rest."""

import ast
from collections.abc import Iterator, Set

from auditor.flow.effects import Acquisition, Handle, Value
from auditor.project.code.modules import Function
from auditor.source.nodes import walk

_WITHIN = (ast.Try, ast.With, ast.AsyncWith)


def gives_another_amount(
    function: Function, acquire: ast.Call, acquisition: Acquisition, ends: Set[str]
) -> bool:
    """Where every plain way passes the call that ends it; `credits.give(n - used)` gives a part back on
    purpose, as a loop does, and `sum(granted)` may be all of it."""
    if acquisition.value is not Value.AMOUNT or acquisition.handle is not Handle.ARGUMENT:
        return False
    if not isinstance(acquire.func, ast.Attribute) or not acquire.args:
        return False
    pool = ast.unparse(acquire.func.value)
    body = function.node.body
    return isinstance(body, list) and any(
        call.lineno > acquire.lineno
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ends
        and ast.unparse(call.func.value) == pool
        and not any(isinstance(node, ast.BinOp | ast.Call) for each in call.args for node in walk(each))
        for call in _on_plain_ways(body)
    )


def _on_plain_ways(body: list[ast.stmt]) -> Iterator[ast.Call]:
    """Calls that are statements, under no condition and in no loop."""
    for statement in body:
        if isinstance(statement, _WITHIN):
            yield from _on_plain_ways(statement.body)
            yield from _on_plain_ways(getattr(statement, "finalbody", []))
        elif isinstance(statement, ast.Expr):
            value = statement.value.value if isinstance(statement.value, ast.Await) else statement.value
            if isinstance(value, ast.Call):
                yield value

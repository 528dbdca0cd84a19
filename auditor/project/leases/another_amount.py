"""`await credits.take(2)` and, on every plain way out, `credits.give()`: a function that means to give back
what it took, and gives another amount. Nobody else is to see to the rest."""

import ast
from collections.abc import Iterator

from auditor.project.code.modules import Function
from auditor.source.nodes import walk

_WITHIN = (ast.Try, ast.With, ast.AsyncWith)


def gives_another_amount(function: Function, acquire: ast.Call, end: ast.Call) -> bool:
    """`credits.give(n - used)` gives a part back on purpose, as a loop does, `sum(granted)` may be all of it,
    and so may `5` after `take(2)` and `take(3)`."""
    if not isinstance(acquire.func, ast.Attribute) or end.lineno < acquire.lineno:
        return False
    taking = ast.unparse(acquire.func)
    if sum(ast.unparse(call.func) == taking for call in function.calls) > 1:
        return False
    told = (*end.args, *(keyword.value for keyword in end.keywords))
    if any(isinstance(node, ast.BinOp | ast.Call) for each in told for node in walk(each)):
        return False
    body = function.node.body
    return isinstance(body, list) and any(call is end for call in _on_plain_ways(body))


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

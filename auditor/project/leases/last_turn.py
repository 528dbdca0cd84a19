"""What a loop over pieces does for a last piece that is shorter: `for at in range(0, size, step):`, and `if
len(piece) < step: buf = pool.take()`."""

import ast
from collections.abc import Sequence

from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def is_of_the_last_turn(function: Function, call: ast.Call) -> bool:
    """There is no turn after the one that takes it."""
    for loop in function.statements:
        match loop:
            case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[_, _, ast.Name(id=step)]), body=body):
                if any(_is_shorter(test, step) for test in _tests_around(body, call)):
                    return True
    return False


def _tests_around(body: Sequence[ast.stmt], call: ast.Call) -> list[ast.expr]:
    return [
        node.test
        for statement in body
        for node in walk(statement)
        if isinstance(node, ast.If) and any(part is call for each in node.body for part in walk(each))
    ]


def _is_shorter(test: ast.expr, step: str) -> bool:
    match test:
        case ast.Compare(ops=[ast.Lt() | ast.NotEq()], comparators=[ast.Name(id=name)]):
            return name == step
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Gt() | ast.NotEq()]):
            return name == step
    return False

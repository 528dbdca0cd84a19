"""Turns of counted loops that differ: the first, where `i == 0` and its kin answer otherwise than ever after;
and a process's own among those of all ranks.
"""

import ast

from auditor.ir.conditions import condition
from auditor.source.nodes import walk

FLAG = "first~"
"""Begins the name of the hidden flag that is true while a loop is in its first turn."""
OWN = "own~"
"""Begins the name of the hidden flag that is true once a loop has had this process's own turn."""


def first_turn_tests(loop: ast.For | ast.AsyncFor) -> dict[str, bool]:
    """Keys of conditions in the body that tell the first turn from the later ones, with their truth in it."""
    counter = _counter(loop)
    if counter is None:
        return {}
    nodes = [node for statement in loop.body for node in walk(statement)]
    if any(isinstance(node, ast.Name) and node.id == counter and _written(node) for node in nodes):
        return {}
    answers = {f"{counter} == 0": True, f"{counter} < 1": True, f"{counter} > 0": False, counter: False}
    tests = (node.test for node in nodes if isinstance(node, (ast.If, ast.IfExp)))
    asked = {found.key for test in tests for part in _parts(test) if (found := condition(part)) is not None}
    return {key: truth for key, truth in answers.items() if key in asked}


def own_turn(loop: ast.For | ast.AsyncFor) -> tuple[ast.If, bool] | None:
    """`if i == rank:` in a loop over all ranks, and what it answers in the process's own turn: there is one,
    and the loop does not end before it. None where that turn leaves the loop: it looks for somebody.
    """
    counter = _counter(loop)
    for statement in loop.body if counter is not None else ():
        match statement:
            case ast.If(
                test=ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as asked], comparators=[right])
            ):
                equal = isinstance(asked, ast.Eq)
                branch = statement.body if equal else statement.orelse
                inside = [node for each in branch for node in walk(each)]
                leaves = any(isinstance(node, (ast.Break, ast.Return, ast.Raise)) for node in inside)
                if not leaves and _is_rank(left, right, counter):
                    return statement, equal
    return None


def _is_rank(left: ast.expr, right: ast.expr, counter: str | None) -> bool:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, ast.Name) and one.id == counter and isinstance(other, (ast.Name, ast.Attribute)):
            name = other.attr if isinstance(other, ast.Attribute) else other.id
            return "rank" in name.lower().split("_")
    return False


def _counter(loop: ast.For | ast.AsyncFor) -> str | None:
    """The name that is 0 in the first turn: `for i in range(n)`, `for i, x in enumerate(xs)`."""
    match loop.target, loop.iter:
        case ast.Name(id=name), ast.Call(func=ast.Name(id="range"), args=[_] | [ast.Constant(value=0), *_]):
            return name
        case (
            ast.Tuple(elts=[ast.Name(id=name), _]),
            ast.Call(func=ast.Name(id="enumerate"), args=[_], keywords=[]),
        ):
            return name
    return None


def _parts(test: ast.expr) -> list[ast.expr]:
    """The tests that `and`, `or` and `not` are made of."""
    match test:
        case ast.BoolOp(values=values):
            return [part for value in values for part in _parts(value)]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _parts(operand)
    return [test]


def _written(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)

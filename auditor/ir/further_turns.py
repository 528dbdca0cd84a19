"""Turns of counted loops that another one follows: `if i + 1 < n:` under `range(n)` says that this is not the
last, so that the loop does not end behind it.
"""

import ast

from auditor.ir.conditions import condition, is_length
from auditor.ir.turns import asked, inside, is_written
from auditor.source.nodes import walk

FURTHER = "further~"
"""Begins the name of the hidden flag that is true while a loop is in a turn that another one follows."""


def further_turn_tests(loop: ast.For | ast.AsyncFor) -> dict[str, bool]:
    """Keys of conditions that are asked in the body, with the answer that says so."""
    counter, limit = _counted(loop)
    nodes = inside(loop)
    if is_written(counter, nodes) or limit is None or _may_change(limit, nodes):
        return {}
    end = ast.unparse(limit)
    answers = {
        f"{counter} + 1 < {end}": True,
        f"{counter} < {end} - 1": True,
        f"{end} > {counter} + 1": True,
        f"{end} - 1 > {counter}": True,
        f"{counter} == {end} - 1": False,
        f"{counter} + 1 == {end}": False,
    }
    answers |= _under_names(loop, nodes, answers)
    keys = {each.key for each in asked(nodes)}
    return {key: truth for key, truth in answers.items() if key in keys}


def _under_names(
    loop: ast.For | ast.AsyncFor, nodes: list[ast.AST], answers: dict[str, bool]
) -> dict[str, bool]:
    """`last = i + 1 == n`, which is asked once at the beginning of each turn."""
    named: dict[str, bool] = {}
    for statement in loop.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Compare() as test):
                known = condition(test)
                stores = [each for each in nodes if is_written(name, [each])]
                if known is not None and known.key in answers and len(stores) == 1:
                    named[name] = answers[known.key] is known.positive
    return named


def _counted(loop: ast.For | ast.AsyncFor) -> tuple[str, ast.expr | None]:
    """What counts the turns, and what it stays below."""
    match loop.target, loop.iter:
        case ast.Name(id=name), ast.Call(func=ast.Name(id="range"), args=[limit] | [_, limit]):
            return name, limit
        case (
            ast.Tuple(elts=[ast.Name(id=name), _]),
            ast.Call(func=ast.Name(id="enumerate"), args=[over], keywords=[]),
        ):
            return name, ast.Call(ast.Name("len", ast.Load()), [over], [])
    return "", None


def _may_change(limit: ast.expr, nodes: list[ast.AST]) -> bool:
    """`range` is asked once: a number that is counted up meanwhile, or a list that grows, has another end."""
    parts = list(walk(limit))
    if any(isinstance(part, ast.Call) and not is_length(part) for part in parts):
        return True
    read = {ast.unparse(part) for part in parts if isinstance(part, ast.Name | ast.Attribute)}
    measured = any(map(is_length, parts))
    return any(_writes(node, read) or (measured and _works_on(node, read)) for node in nodes)


def _writes(node: ast.AST, read: set[str]) -> bool:
    if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript) or isinstance(node.ctx, ast.Load):
        return False
    return ast.unparse(node).partition("[")[0] in read


def _works_on(node: ast.AST, read: set[str]) -> bool:
    """`xs.append(x)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in read
    )

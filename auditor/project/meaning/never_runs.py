"""Statements that look like a call and do nothing: what they make would have to be awaited, or gone over.

bank.put_back(session)                # a coroutine that nobody awaits
map(pool.put, rows)                   # lazy, and nobody asks it for anything
"""

import ast

from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function

LAZY = frozenset({"map", "filter"})


def never_runs(function: Function, call: ast.Call, calls: Calls) -> bool:
    """Its result is dropped at once, and it is for that to be run. A decorator may run a coroutine; of whom
    only the method's name tells, something else must be awaited."""
    if call not in function.dropped:
        return False
    if isinstance(call.func, ast.Name) and call.func.id in LAZY:
        return True
    targets, made, _ = calls.targets(function, call)
    if made is not None or not targets or not all(map(_is_a_coroutine, targets)):
        return False
    return not calls.guessed(function, call) or _is_awaited_otherwise(function, call)


def _is_awaited_otherwise(function: Function, call: ast.Call) -> bool:
    """`await bank.borrow()`, of the same `bank`."""
    whom = ast.dump(call.func.value) if isinstance(call.func, ast.Attribute) else None
    awaited = (node.value for node in function.of_kind(ast.Await))
    return any(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and ast.dump(each.func.value) == whom
        for each in awaited
    )


def _is_a_coroutine(target: Function) -> bool:
    return isinstance(target.node, ast.AsyncFunctionDef) and not target.node.decorator_list

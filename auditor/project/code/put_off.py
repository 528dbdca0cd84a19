"""Calls that only say what is to be done: `map` does it when somebody asks, `partial` when it is called."""

import ast

from auditor.ir.ops import Call
from auditor.project.code.bindings import is_dropped
from auditor.project.code.modules import Function

LAZY = frozenset({"map", "starmap", "imap"})


def never_run(function: Function, call: Call) -> bool:
    """`map(pool.free, blocks)` as a statement frees nothing; `undo = partial(pool.free, block)` frees when
    this function calls `undo()`, where it does nothing else with the name."""
    if call.receiver is None and call.method in LAZY:
        return is_dropped(function, call.at)
    return call.method == "partial" and _only_called(function, call.at)


def _only_called(function: Function, made: ast.Call) -> bool:
    name = next(
        (
            node.targets[0].id
            for node in function.statements
            if isinstance(node, ast.Assign) and node.value is made and isinstance(node.targets[0], ast.Name)
        ),
        None,
    )
    called = {id(call.func) for call in function.calls}
    uses = [
        node
        for node in function.nodes
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    ]
    return bool(uses) and all(id(node) in called for node in uses)

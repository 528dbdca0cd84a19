"""Amounts that nobody can give back: `if not budget.take(n): return None` in a function that ends with the
amount taken and noted nowhere, and that never gives anything back to the budget itself.

Others may know the amount where it goes into a record, or comes from one; that is followed, and no loss. What
is lost at the end of such a function is known to nobody."""

import ast
from collections.abc import Set

from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def is_noted_nowhere(function: Function, acquire: ast.Call, ends: Set[str]) -> bool:
    """`ends` are the names of what gives back to the pool."""
    denied = any(
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and node.operand is acquire
        for test in (each.test for each in function.statements if isinstance(each, ast.If))
        for node in walk(test)
    )
    return denied and not any(last_name(call) in ends for call in function.calls)

"""What a caller calls the things that a function it calls has names for."""

import ast

from auditor.project.code.calls import is_bound, parameter_for
from auditor.project.code.modules import Function


def in_callers_words(root: str, wrapper: Function, function: Function, call: ast.Call) -> str | None:
    """What the caller calls the wrapper's `root`: its receiver, an argument, or the same global."""
    bound = is_bound(wrapper, call)
    if bound and wrapper.parameters and root == wrapper.parameters[0]:
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        return ast.unparse(receiver) if receiver is not None and is_plain(receiver) else None
    if root in wrapper.parameters:
        given: list[tuple[int | str, ast.expr]] = [*enumerate(call.args)]
        given += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
        for position, value in given:
            if parameter_for(wrapper, position, bound) == root:
                return ast.unparse(value) if is_plain(value) else None
        return None
    is_global = root in wrapper.module.assigned or root in wrapper.module.imports
    return root if is_global and wrapper.module is function.module else None


def is_plain(node: ast.expr) -> bool:
    """Names and attributes only: reading it twice gives the same object and does nothing else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)

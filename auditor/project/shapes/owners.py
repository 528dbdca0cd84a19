"""The names that fields are read off: an object's own, its class's, and what a module has for each thread."""

import ast
from collections.abc import Mapping, Set

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function, last_part


def owners_of(method: Function) -> Set[str]:
    """`self`, and `Staging` of `Staging._cache`, in its methods; `_local` of `_local.states` in functions."""
    if method.cls is None or method.parent is not None:
        threads = {name for name, value in method.module.assigned.items() if _is_local(value)}
        return threads | {method.owner} if method.owner else threads
    return {method.cls.name, method.owner or method.cls.name}


def shared_by(function: Function) -> Mapping[str, ast.expr]:
    """What it has in common with others by name: the module's, or the locals of the function around both."""
    if function.parent is not None:
        given = assignments(function.parent)
        return {target.id: value for target, value in given if isinstance(target, ast.Name)}
    return function.module.assigned if function.cls is None else {}


def _is_local(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and last_part(value.func) == "local"

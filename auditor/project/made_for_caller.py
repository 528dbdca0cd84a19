"""Whether what a function returns with a lease inside was made by it: then nobody else knows that object."""

import ast
from collections.abc import Iterator

from auditor.project.bindings import statements_of
from auditor.project.calls import Calls
from auditor.project.modules import Function


def made_for_caller(calls: Calls, function: Function) -> bool:
    """Every return gives None or an object of the project made right there: `return Context(lease)`, or
    `context = Context(lease)`, of which only fields are touched before `return context`."""
    returned = [node.value for node in statements_of(function.node) if isinstance(node, ast.Return)]
    made = [value for value in returned if value is not None and not _is_none(value)]
    return bool(made) and all(_is_made(calls, function, value) for value in made)


def _is_made(calls: Calls, function: Function, value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return _constructs(calls, function, value)
    if not isinstance(value, ast.Name):
        return False
    given = list(_given(function, value.id))
    if not given or not all(
        isinstance(each, ast.Call) and _constructs(calls, function, each) for each in given
    ):
        return False
    return all(
        _looks_at_a_field(function, node) for node in ast.walk(function.node) if _reads(node, value.id)
    )


def _constructs(calls: Calls, function: Function, call: ast.Call) -> bool:
    """A class of the project that does not end itself when it is dropped."""
    made = calls.targets(function, call)[1]
    return made is not None and not {"__del__", "__new__"} & made.methods.keys()


def _given(function: Function, name: str) -> Iterator[ast.expr]:
    for node in statements_of(function.node):
        match node:
            case ast.Assign(targets=[ast.Name(id=bound)], value=value) if bound == name:
                yield value


def _reads(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


def _looks_at_a_field(function: Function, name: ast.AST) -> bool:
    """`context.engine`, or `return context`; no call gets it."""
    return any(
        (isinstance(node, ast.Attribute | ast.Return) and node.value is name)
        for node in ast.walk(function.node)
    )


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None

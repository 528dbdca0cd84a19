"""Functions that make the record which they return: nobody else knows it then."""

import ast

from auditor.project.code.bindings import given_to
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def made_for_it(calls: Calls, function: Function, name: str) -> bool:
    """Whether all that the function ever calls so was made by functions that do nothing else with it:
    `plan = self._plan(ids)`."""
    if name in function.parameters:
        return False
    given = list(given_to(function, name))
    return bool(given) and all(isinstance(each, ast.Call) and _makes(calls, function, each) for each in given)


def _makes(calls: Calls, function: Function, call: ast.Call) -> bool:
    targets, constructed, _ = calls.targets(function, call)
    if constructed is not None:
        return True
    sure = bool(targets) and not calls.guessed(function, call)
    return sure and all(_returns_a_new_one(calls, target) for target in targets)


def _returns_a_new_one(calls: Calls, target: Function) -> bool:
    """`return Plan(rows)`; `plan = Plan(rows)`, `plan.size = 3`, `return plan`."""
    returned = [node.value for node in target.statements if isinstance(node, ast.Return)]
    return bool(returned) and all(value is not None and _is_new(calls, target, value) for value in returned)


def _is_new(calls: Calls, target: Function, value: ast.expr) -> bool:
    if isinstance(value, ast.Name):
        given = list(given_to(target, value.id))
        made = bool(given) and all(isinstance(each, ast.Call) for each in given)
        return made and _is_only_touched(target, value.id) and all(_is_new(calls, target, v) for v in given)
    return isinstance(value, ast.Call) and calls.targets(target, value)[1] is not None


def _is_only_touched(target: Function, name: str) -> bool:
    """Its fields are set and read, and it is returned."""
    harmless: set[int] = set()
    for node in target.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=touched) as owner) if touched == name:
                harmless.add(id(owner))
            case ast.Return(value=ast.Name() as result):
                harmless.add(id(result))
    called = {id(part) for call in target.calls for part in walk(call.func)}
    return all(
        isinstance(node.ctx, ast.Store) or (id(node) in harmless and id(node) not in called)
        for node in target.of_kind(ast.Name)
        if node.id == name
    )

"""Marks that answer with what lies under the key: `slot = cache.pin(key)`, ended by `cache.unpin(key)`."""

import ast

from auditor.project.code.bindings import given_to
from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import own_parameters


def answers_what_lies_there(method: Function) -> bool:
    """Not `return node`, of a node that was looked up and is what its end is told; the end's own parameter
    says which of them it is."""
    key = own_parameters(method)[:1]
    answers = [value for value in field_work(method).returned if not isinstance(value, ast.Constant)]
    return bool(key and answers) and all(_lies_under(method, value, key[0]) for value in answers)


def _lies_under(method: Function, value: ast.expr, key: str) -> bool:
    match value:
        case ast.Name(id=name) if name != key:
            found = [_is_looked_up(each, key) for each in given_to(method, name)]
            return any(found) and (all(found) or _is_put_there(method, name, key))
    return _is_looked_up(value, key)


def _is_put_there(method: Function, name: str, key: str) -> bool:
    """`self.slot_of[name] = slot`, of one that is new; `slot = self.slot_of[name] = make()`, too."""
    chained = (
        node.targets
        for node in method.statements
        if isinstance(node, ast.Assign) and name in [getattr(each, "id", "") for each in node.targets]
    )
    return any(_is_looked_up(each, key) for targets in chained for each in targets) or any(
        getattr(put.value, "id", "") == name and getattr(put.key, "id", "") == key
        for put in field_work(method).put
    )


def _is_looked_up(value: ast.expr, key: str) -> bool:
    match value:
        case (
            ast.Subscript(value=ast.Attribute(), slice=ast.Name(id=told))
            | ast.Call(func=ast.Attribute(value=ast.Attribute(), attr="get"), args=[ast.Name(id=told), *_])
        ):
            return told == key
    return False

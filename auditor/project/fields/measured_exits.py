"""Exit methods that give back by a measure only: the body was slow, the share was large."""

import ast
from collections.abc import Sequence

from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.exits import ASKING, BEGINNINGS, asks_for, own_attributes

CHANGING = frozenset({"append", "appendleft", "add", "pop", "popleft", "remove", "discard", "extend", "push"})


def measures_only(method: Function, family: Sequence[Function], field: str) -> bool:
    """It asks for more or less of something, and for nothing else but whether there is anything to give back.

    A flag, or a count of entries, may say that there is nothing; a time and a size say nothing of that."""
    own = method.owner
    if own is None:
        return False
    tests = [
        node.test for node in method.nodes if isinstance(node, ASKING) and not asks_for(node.test, own, field)
    ]
    return bool(tests) and all(_is_a_measure(test, method, family, own) for test in tests)


def _is_a_measure(test: ast.expr, method: Function, family: Sequence[Function], own: str) -> bool:
    if isinstance(test, ast.Name):
        values = list(given_to(method, test.id))
        return bool(values) and all(_is_a_measure(value, method, family, own) for value in values)
    if not isinstance(test, ast.Compare) or not all(
        isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in test.ops
    ):
        return False
    sides = [test.left, *test.comparators]
    if any(isinstance(side, ast.Constant) and side.value in (0, 1) for side in sides):
        return False
    asked = {name for side in sides for name in own_attributes(side, method, own)}
    return asked.isdisjoint(_changing(family))


def _changing(family: Sequence[Function]) -> set[str]:
    """Fields that change while the object is in use, or count."""
    found = set()
    for method in family:
        own = method.owner or ""
        for node in method.nodes:
            match node:
                case ast.AugAssign(target=ast.Attribute() as changed):
                    pass
                case ast.Call(func=ast.Attribute(value=ast.Attribute() as changed, attr=way)) if (
                    way in CHANGING
                ):
                    pass
                case ast.Attribute(ctx=ast.Store()) as changed if method.name not in BEGINNINGS:
                    pass
                case _:
                    continue
            found.add(own_attribute(changed, own) or "")
    return found

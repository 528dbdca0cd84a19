"""Exit methods that give nothing back where a measure says so: the body was slow, the share was large."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import given_to, own_attribute, own_name
from auditor.project.code.modules import Function

BEGINNINGS = frozenset({"__init__", "__post_init__", "__enter__", "__aenter__"})
CHANGING = frozenset({"append", "appendleft", "add", "pop", "popleft", "remove", "discard", "extend", "push"})


def measures_only(method: Function, family: Sequence[Function], field: str) -> bool:
    """It asks for more or less of something, and for nothing else but whether there is anything to give back.

    A flag, or a count of entries, may say that there is nothing; a time and a size say nothing of that."""
    own = own_name(method)
    if own is None:
        return False
    asking = (ast.If, ast.IfExp, ast.While, ast.Assert)
    tests = [
        node.test
        for node in ast.walk(method.node)
        if isinstance(node, asking) and not _asks_for(node.test, own, field)
    ]
    return bool(tests) and all(_is_a_measure(test, method, family, own) for test in tests)


def overridden(method: Function, family: Sequence[Function]) -> bool:
    """`family` begins with the class itself: another method of the name comes before this one."""
    return next(each for each in family if each.name == method.name) is not method


def _asks_for(test: ast.expr, own: str, field: str) -> bool:
    match test:
        case ast.Compare(left=asked, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return own_attribute(asked, own) == field
        case ast.UnaryOp(op=ast.Not(), operand=asked):
            return own_attribute(asked, own) == field
    return own_attribute(test, own) == field


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
    asked = {name for side in sides for name in _own_attributes(side, method, own)}
    return asked.isdisjoint(_changing(family))


def _own_attributes(node: ast.expr, method: Function, own: str) -> Iterator[str]:
    """Also those that a local name was made of."""
    values = [node]
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            values += given_to(method, inner.id)
    for value in values:
        for inner in ast.walk(value):
            if isinstance(inner, ast.Attribute) and own_attribute(inner, own):
                yield inner.attr


def _changing(family: Sequence[Function]) -> set[str]:
    """Fields that change while the object is in use, or count."""
    found = set()
    for method in family:
        own = own_name(method) or ""
        for node in ast.walk(method.node):
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

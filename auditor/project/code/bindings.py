"""The statements of one function, what they assign to fields of its own object; whether it is a test's."""

import ast
import re
from collections.abc import Iterator

from auditor.project.code.modules import Function
from auditor.source.nodes import statements_below

TEST_FILE = re.compile(r"(?:^|/)(?:test_[^/]*|[^/]*_test|test|conftest)\.py$")

TEST_FOLDER = re.compile(r"(?:^|/)tests?/")

TEST_NAME = re.compile(r"test(?:\d+|_\w+)?")
"""Functions that are tests wherever they stand."""


def own_attribute(target: ast.expr, owner: str) -> str | None:
    """`attr` of `owner.attr`."""
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == owner:
        return target.attr
    return None


def root_of(node: ast.expr) -> str:
    """`entry` of `entry.blocks[0]`, and nothing of what has no name."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def names_bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement binds, or says something about."""
    targets: list[ast.expr] = []
    match node:
        case ast.Assign():
            targets = list(node.targets)
        case ast.AnnAssign(target=target) | ast.For(target=target) | ast.AsyncFor(target=target):
            targets = [target]
        case ast.With(items=items):
            targets = [item.optional_vars for item in items if item.optional_vars is not None]
        case ast.Assert(test=ast.Call(args=[ast.Name() as target, *_])):
            targets = [target]
    while targets:
        target = targets.pop()
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Tuple):
            targets += target.elts


def suites_of(function: ast.AST) -> Iterator[list[ast.stmt]]:
    """The statement lists among them."""
    body = getattr(function, "body", [])
    if isinstance(body, list):  # no lambda
        yield body
    for statement in statements_below(function):
        for name in ("body", "orelse", "finalbody"):
            yield from [suite] if (suite := getattr(statement, name, [])) else []
        for handler in getattr(statement, "handlers", ()):
            yield handler.body


def given_to(function: Function, name: str) -> Iterator[ast.expr]:
    """What plain assignments give to a local name."""
    for target, value in assignments(function):
        if isinstance(target, ast.Name) and target.id == name:
            yield value


def gone_through(function: Function, name: str) -> Iterator[ast.expr]:
    """What loops go through under a local name."""
    for node in function.statements:
        match node:
            case ast.For(target=ast.Name(id=turn), iter=over) if turn == name:
                yield over


def told_by_position(call: ast.Call) -> Iterator[tuple[int | str, ast.expr]]:
    """What a call is told, under the number or the name of the argument."""
    yield from enumerate(call.args)
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value


def assigned_by(node: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets with their values: `a, b = x, y` is two."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    yield from zip(target.elts, value.elts, strict=False)
                else:
                    yield target, value
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield target, value


def assignments(function: Function) -> list[tuple[ast.expr, ast.expr]]:
    """Of all its statements."""
    if function.assigned is None:
        function.assigned = [each for node in function.statements for each in assigned_by(node)]
    return function.assigned


def given_to_field(function: Function, name: str) -> Iterator[ast.expr]:
    """What assignments give to a field of that name."""
    for target, value in assignments(function):
        if isinstance(target, ast.Attribute) and target.attr == name:
            yield value


def entries_put(function: Function) -> Iterator[tuple[str, ast.expr, bool]]:
    """Fields of its own object into which it puts something, with what that is, and whether it is put there
    under a key; `None` says that there is nothing."""
    for node in function.nodes if function.owner else ():
        match node:
            case ast.Assign(targets=targets, value=value):
                tables, keyed = [each.value for each in targets if isinstance(each, ast.Subscript)], True
            case ast.Call(func=ast.Attribute(value=table, attr="setdefault"), args=[_, value]):
                tables, keyed = [table], True
            case ast.Call(func=ast.Attribute(value=table, attr="append" | "appendleft"), args=[value]):
                tables, keyed = [table], False
            case _:
                continue
        for table in tables:
            attr = own_attribute(table, function.owner or "")
            if attr is not None and not (isinstance(value, ast.Constant) and value.value is None):
                yield attr, value, keyed


def ways(value: ast.expr) -> Iterator[ast.expr]:
    """`a` and `b` of `a if flag else b`, awaited or not."""
    match value:
        case ast.IfExp(body=one, orelse=other):
            yield from (*ways(one), *ways(other))
        case ast.Await(value=inner):
            yield from ways(inner)
        case _:
            yield value


def is_dropped(function: Function, call: ast.Call) -> bool:
    """Nobody asks for what the call returns."""
    return any(isinstance(node, ast.Expr) and awaited(node.value) is call for node in function.statements)


def awaited(value: ast.expr) -> ast.expr:
    """The call of `await call()`, or what is there without that."""
    return value.value if isinstance(value, ast.Await) else value


def told_anything(call: ast.Call) -> bool:
    return bool(call.args or call.keywords)

"""The statements of one function, and what they assign to fields of its own object."""

import ast
from collections.abc import Iterator


def statements_of(function: ast.AST) -> Iterator[ast.stmt]:
    """All statements of a function, those of nested functions and classes left out."""
    body = getattr(function, "body", [])
    stack = list(reversed(body)) if isinstance(body, list) else []
    while stack:
        node = stack.pop()
        if not isinstance(node, ast.stmt):
            continue
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for name in ("finalbody", "orelse", "body"):
            stack.extend(reversed(getattr(node, name, [])))
        for handler in getattr(node, "handlers", ()):
            stack.extend(reversed(handler.body))
        for case in getattr(node, "cases", ()):
            stack.extend(reversed(case.body))


def own_attribute(target: ast.expr, owner: str) -> str | None:
    """`attr` of `owner.attr`."""
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == owner:
        return target.attr
    return None

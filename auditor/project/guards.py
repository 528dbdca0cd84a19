"""Statements that catch what is raised in them: `try` and its handlers, `with suppress(...)`."""

import ast

WITHS = (ast.With, ast.AsyncWith)


def swallows(guard: ast.AST) -> bool:
    """A statement that can turn an exception into an ordinary way on."""
    if isinstance(guard, (ast.With, ast.AsyncWith)):
        return any("suppress" in ast.unparse(item.context_expr) for item in guard.items)
    return isinstance(guard, (ast.Try, ast.TryStar))


def caught_by(guard: ast.AST) -> str | None:
    """The failures that a handler or a `suppress` names."""
    if isinstance(guard, ast.ExceptHandler) and guard.type is not None:
        return ast.unparse(guard.type)
    if isinstance(guard, WITHS) and swallows(guard):
        return " ".join(ast.unparse(item.context_expr) for item in guard.items)
    return None


def encloses(guard: ast.AST, line: int) -> bool:
    body: list[ast.stmt] = getattr(guard, "body", [])
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or 0)

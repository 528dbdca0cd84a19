"""Statements that catch what is raised in them: `try` and its handlers, `with suppress(...)`."""

import ast
import re

from auditor.project.code.modules import last_part
from auditor.source.nodes import walk

QUIET = re.compile(
    r"\w*(?:lock|mutex|sem|semaphore|cond|condition|timeout|timeout_at|move_on_after|fail_after)_?", re.I
)
"""Last names of contexts that come and go without failing, or fail only what is within."""

TIMED = re.compile(r"timeout|move_on|fail_after")

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


def caught_names(guard: ast.AST) -> frozenset[str]:
    """The same as names of classes."""
    return frozenset(re.findall(r"\w+", caught_by(guard) or ""))


def encloses(guard: ast.AST, line: int) -> bool:
    body: list[ast.stmt] = getattr(guard, "body", [])
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or 0)


def comes_and_goes(at: ast.AST, line: int) -> bool:
    """`async with self.lock:`, `async with asyncio.timeout(10):`, entered (its context) or left. A time-out
    that is left late ends what was awaited in it after this line."""
    contexts = [item.context_expr for item in at.items] if isinstance(at, WITHS) else [at]
    called = [each.func if isinstance(each, ast.Call) else each for each in contexts]
    named = [last_part(each) for each in called]
    if not all(QUIET.fullmatch(name) for name in named):
        return False
    timed = isinstance(at, WITHS) and any(TIMED.search(name) for name in named)
    return not timed or not any(isinstance(node, ast.Await) and node.lineno > line for node in walk(at))


def in_a_finally(function: ast.AST, node: ast.AST) -> bool:
    """The node stands in a `try` within a `finally`."""
    tries = (each for each in walk(function) if isinstance(each, ast.Try | ast.TryStar))
    within = (inner for outer in tries for statement in outer.finalbody for inner in walk(statement))
    guarded = (part for inner in within if isinstance(inner, ast.Try | ast.TryStar) for part in inner.body)
    return any(each is node for part in guarded for each in walk(part))

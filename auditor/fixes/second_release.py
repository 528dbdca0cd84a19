"""A release of what was released before, on every path: deleted."""

import ast

from auditor.case import Case, Parsed
from auditor.fixes.life import (
    EXITS,
    block_of,
    called_by,
    enclosing_function,
    enclosing_statement,
    leaves,
    statements_in,
)
from auditor.fixes.lines import whole
from auditor.fixes.try_finally import is_whole
from auditor.model import Edit, FixOffer, Safety


def without_second_release(case: Case) -> FixOffer | None:
    """The later release goes, where it always comes after the earlier; else the earlier, where it is always
    followed by the later."""
    file = case.file
    if file is None or len(case.finding.trace) < 2:
        return None
    later = _release_at(file, case.finding.span.line, case.finding.span.column)
    if later is None or not is_whole(file, later):
        return None
    for step in case.finding.trace:
        earlier = _release_at(file, step.line, step.column) if step.path == file.path else None
        if earlier is not None and earlier is not later and _same(earlier, later):
            found = _either(file, earlier, later)
            return FixOffer(Safety.UNSAFE, *found) if found else None
    return None


def _release_at(file: Parsed, line: int, column: int) -> ast.stmt | None:
    """The statement that consists of the call there."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call) and node.lineno == line and file.span(node).column == column:
            statement = enclosing_statement(file, node)
            return statement if called_by(statement) is node else None
    return None


def _same(earlier: ast.stmt, later: ast.stmt) -> bool:
    return ast.unparse(earlier) == ast.unparse(later)


def _either(file: Parsed, earlier: ast.stmt, later: ast.stmt) -> tuple[str, tuple[Edit, ...]] | None:
    function = enclosing_function(file, later)
    if function is None or enclosing_function(file, earlier) is not function:
        return None
    if _always_before(file, earlier, later):
        return "the second release is deleted", (_deleted(file, later),)
    if is_whole(file, earlier) and _always_after(file, earlier, later):
        return "the first release is deleted: the second one comes anyway", (_deleted(file, earlier),)
    return None


def _deleted(file: Parsed, statement: ast.stmt) -> Edit:
    """The statement away, with the `if` that was there for it alone; else `pass` keeps its block."""
    if len(block_of(file, statement)) > 1:
        return whole(file, statement)
    match file.parents[statement]:
        case ast.If(test=test, orelse=[]) as guard if is_whole(file, guard) and not _acts(test):
            others = block_of(file, guard)
            if len(others) > 1 and guard in others:
                return whole(file, guard)
    return Edit(file.span(statement), "pass")


def _acts(test: ast.expr) -> bool:
    return any(isinstance(node, (ast.Call, ast.Await, ast.NamedExpr)) for node in ast.walk(test))


def _always_before(file: Parsed, earlier: ast.stmt, later: ast.stmt) -> bool:
    """Whether `earlier` is in a block around `later`, so that there is no other way to it."""
    block = list(block_of(file, earlier))
    after = block[block.index(earlier) + 1 :]
    return later in set(statements_in(after))


def _always_after(file: Parsed, earlier: ast.stmt, later: ast.stmt) -> bool:
    """Whether `later` comes on every way out: it is in a `finally` around, or nothing leaves in between."""
    node: ast.AST = earlier
    while node in file.parents:
        parent = file.parents[node]
        if isinstance(parent, ast.Try) and later in parent.finalbody:
            return node not in parent.finalbody
        block = list(block_of(file, node)) if isinstance(node, ast.stmt) else []
        onward = block[block.index(node) + 1 :] if isinstance(node, ast.stmt) and block else []
        until = onward[: onward.index(later)] if later in onward else onward
        if any(isinstance(each, EXITS) and leaves(each, onward) for each in statements_in(until)):
            return False
        if later in onward:
            return True
        if isinstance(parent, (ast.For, ast.While, ast.AsyncFor, ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        node = parent
    return False

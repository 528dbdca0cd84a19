"""The mixin as first base of a class, and the import that brings it."""

import ast

from auditor.adopt.draft import Draft, Refused

MIXIN = "MemoryPoolMixin"
STANDARD = "reference_modules.mixin"


def based(draft: Draft, owner: str) -> Draft:
    """`class C(Base)` as `class C(MemoryPoolMixin, Base)`."""
    node = draft.class_named(owner)
    if not node.bases:
        raise Refused("it has no base")
    first = draft.start(node.bases[0])
    own_line = not draft.lines[first[0] - 1][: first[1]].strip()
    glue = f",\n{draft.indent(first[0])}" if own_line else ", "
    return draft.replaced((first, first, MIXIN + glue))


def imported(draft: Draft, module: str) -> Draft:
    """`from module import MemoryPoolMixin` after the imports that the file begins with."""
    if _is_imported(draft):
        return draft
    statement = f"from {module} import {MIXIN}"
    last = _last_import(draft)
    if last is not None:
        if not draft.alone(last):
            raise Refused(
                f"{draft.path}:{last.lineno} has an import that shares a line with another statement"
            )
        return draft.with_lines(draft.end(last)[0] + 1, [statement])
    body = draft.tree.body
    at = 1 if _is_docstring(body[0]) and len(body) > 1 else 0
    first = body[at]
    row = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", []))])
    return draft.with_lines(row, [statement, "", ""])


def _is_imported(draft: Draft) -> bool:
    """Whether the file has a name for the mixin already, be it by import or because it defines it."""
    for node in draft.tree.body:
        match node:
            case ast.ImportFrom(names=names) if any((each.asname or each.name) == MIXIN for each in names):
                return True
            case ast.ClassDef(name=name) if name == MIXIN:
                return True
    return False


def _last_import(draft: Draft) -> ast.stmt | None:
    found = None
    for node in draft.tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            break
        if isinstance(node, ast.Import | ast.ImportFrom):
            found = node
    return found


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
